"""The operator's commands: audit, dead letters, producers. Imported by module; `run_access` opens a run."""
