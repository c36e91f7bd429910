"""How a compiled kernel runs: a call in memory, the threads that share its tasks, and their limits."""
