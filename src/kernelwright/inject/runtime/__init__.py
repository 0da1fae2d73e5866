"""What injected modules share while a forward runs: their sites, work ahead, the running model."""
