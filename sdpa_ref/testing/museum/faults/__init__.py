"""The faults, a module for each kind, each fault a function that takes the place of one step of the kernel."""
