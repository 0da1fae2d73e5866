"""Whether a new forward is trusted: first sight, error bounds, the float32 run behind them."""
