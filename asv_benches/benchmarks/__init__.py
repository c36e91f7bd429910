"""The benchmarks that asv runs on every commit: they import with any version of the library."""
