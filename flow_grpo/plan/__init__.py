"""Plans of runs: forwards, arithmetic, memory and time, measured and estimated."""
