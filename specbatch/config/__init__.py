"""Configuration: `EngineConfig`, shapes of drafts, simulated acceptance, and how settings become options."""
