"""`kvfix look`, `attach` and `detach`: into an engine that runs already, started with kvfix or without."""
