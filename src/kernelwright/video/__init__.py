"""LTX-Video from a prompt to an mp4, in plain diffusers and injected, measured and compared."""
