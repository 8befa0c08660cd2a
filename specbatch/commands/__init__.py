"""What the commands of `specbatch.cli` share: the engine's options and the output folder."""
