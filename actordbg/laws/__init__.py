"""Laws: a captured input changed in a way that must not matter, run through the same loaded Actor.

In: a dump, what its forward gave, and the loaded Actor (`actordbg.actor.session`). Out: a `LawAnswer` for each law, which a
result keeps in its `extra`. No truth and no tolerance is needed, since an Actor is compared with itself. The table of laws and
what makes answers are in `judging`; begin reading in `law_run`, which asks the laws one after another.
"""
