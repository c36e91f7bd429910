"""Other libraries as targets: a module for each, with a function `target` that imports it and says what it claims."""
