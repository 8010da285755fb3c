"""What a user touches: the engine, its configuration, sampling parameters and outputs."""
