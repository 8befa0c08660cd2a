"""Model families, one file each. `specbatch.models.registry` lists them."""
