"""`specbatch check`: an engine against the baseline, with the model alone in float32 as the referee."""
