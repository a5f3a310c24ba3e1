"""`kvfix look`, `attach` and `detach`: read and patch a running engine, started with kvfix or without."""
