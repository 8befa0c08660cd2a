"""Model families, one file each. `specbatch.models.config` is their registry."""
