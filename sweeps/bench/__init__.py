"""`specbatch bench`: decode and verify steps, closed loops and TTFT, compared with the limits of the device."""
