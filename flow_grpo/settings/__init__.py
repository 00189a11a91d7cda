"""Every setting, what is refused, config files and the command line."""
