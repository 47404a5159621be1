"""Laws (invariance checks): change a captured input in a way that must not matter, and run it through the same loaded Actor.

In: a dump, its forward's results, and the loaded Actor (`actordbg.actor.session`). Out: a `LawAnswer` for each law, which a
result keeps in its `extra`. No truth and no tolerance is needed, since an Actor is compared with itself. `judging` has the list
of laws and builds their answers; begin reading in `law_run`, which checks the laws in order.
"""
