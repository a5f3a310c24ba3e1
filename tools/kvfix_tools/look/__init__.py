"""`kvfix look`, `attach` and `detach`: read and patch a running engine. The engine may have started without kvfix."""
