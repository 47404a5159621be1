"""The settings of a replay, from every place where a user sets them to the configuration that results on this machine.

In: flags, environment variables, `actordbg.toml`, an accelerate file (`sources`). Out: a `ReplayConfig` (`replay_config`, the
table of settings), with nothing left open a `Choices` (`choices`), and a configuration that ran in words (`as_ran`).
Consent and plugins are facts of a process, never settings. Begin with `replay_config`.
"""
