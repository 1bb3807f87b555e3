// Carries the precompiled header that the torch-facing rooms reuse.
