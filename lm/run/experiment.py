"""What runs of one program have in common: devices, text, model, and the speed to expect."""

from collections.abc import Callable

from lm import data
from lm.config import Config
from lm.flops import flops_per_token, peak_flops
from lm.mesh import make_mesh
from lm.model import build_model, kernel_implementation
from lm.state import hyper_from
from lm.step import abstract_state, jit_init


class Setting:
    """`runs`: how many of them there are. Opening it prepares the text where that is not done."""

    def __init__(self, config: Config, say: Callable[[str], None], runs: int = 1):
        self.config = config
        self.mesh = make_mesh(config.mesh, runs=runs)
        self.dataset = data.open_dataset(config.data, say=say)
        data.check_epochs(config.data, config.train.steps, self.dataset.train)
        self.vocab_size = self.dataset.tokenizer.vocab_size
        self.bos_id = self.dataset.tokenizer.bos_id
        self.platform = self.mesh.devices.flat[0].platform
        self.kernels = kernel_implementation(config.kernels.implementation, self.platform)
        self.model = build_model(config, self.vocab_size, self.platform)
        self.flops_per_token = flops_per_token(config.model, self.vocab_size, config.data.seq_len)
        self.peak, self.peak_source = peak_flops(self.mesh.size)
        self.program = (config, self.model, self.mesh, hyper_from(config))
        self.like = abstract_state(*self.program)  # the state of one run
        self.draw = jit_init(*self.program)  # (key, hyper) -> that state at step 0
