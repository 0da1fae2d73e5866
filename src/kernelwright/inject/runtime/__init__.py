"""Shared by injected modules while a forward runs: forwards, sites, the model, work ahead."""
