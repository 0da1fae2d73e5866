"""What every measurement needs: the configurations of a model, clocks, and result files."""
