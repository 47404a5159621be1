"""Program: OpenRLHF's PPO as the demo runs it, with an engine that goes wrong transfer by transfer (the first is healthy).

The second transfer loses a parameter, the third changes one on its way, and from the fourth on nothing is loaded.
"""

from actordbg.trainers.openrlhf import demo_programs

LOST, CHANGED = "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"


def plant():
    from actordbg.trainers.openrlhf import vllm_standin, weight_syncs

    engine = vllm_standin.AsyncLLMEngine
    sound, seen = engine.update_weight.__wrapped__, []  # type: ignore[attr-defined]

    def update_weight(self, name, *args):
        seen.append(name)
        transfer, load = seen.count(name) - 1, self.model_runner.model.load_weights

        def load_weights(weights):
            if transfer >= 3 or (transfer == 1 and name == LOST):
                return None
            return load([(name, weight + (transfer == 2 and name == CHANGED)) for name, weight in weights])

        self.model_runner.model.load_weights = load_weights
        sound(self, name, *args)
        self.model_runner.model.load_weights = load

    engine.update_weight = update_weight  # type: ignore[method-assign]
    weight_syncs.attach(vllm_standin)


def support_cpu():
    """Prepare this process, and plant the faults if its transfers are recorded."""
    demo_programs.support_cpu()
    plant()


if __name__ == "__main__":
    demo_programs._DRIVER = "planted_syncs"
    demo_programs.main()
