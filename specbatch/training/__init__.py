"""Training of draft heads for a model of one's own: `specbatch train-draft`."""
