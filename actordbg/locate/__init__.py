"""Name the module in which a configuration goes wrong, and what is wrong with it.

In: a loaded Actor (`actordbg.actor.session`) and a recorded input. Out: a `ModelIdentity` for each rank (`identity`: what the
loaded model *is*, bit for bit, against transformers' own model of the same checkpoint) and a `Located` (`locate_run`: what each
module *does*, given the truth's input, in units of what the dtype costs a healthy model there). Both travel in a result's
`extra`; `verdict` puts them into words at the desk, without torch. Begin reading in `forced_forward`, then `locate_run`.
"""
