"""Whether a new forward may be trusted: first sight, error bounds, the float32 run behind them."""
