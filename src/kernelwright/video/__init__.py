"""LTX-Video from prompt to mp4, in plain diffusers and injected, timed and compared."""
