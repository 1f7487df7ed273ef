"""The start of a run on one machine: checks, run folder, Redis, child processes, live view. Imported by module;
`command_line` is what every command shares."""
