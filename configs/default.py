"""The default run: a small pre-norm decoder, trained on the sources of Python's standard library.

Question: does this machine train end to end, on real text that it already has?
Command:  uv run train.py --config=configs/default.py
Cost:     under five minutes on two CPU cores, nothing downloaded.
Result:   1.30 bits per byte on held-out modules; a 5-gram model of bytes reaches 1.75.

Flags and config files may also set fields that are not listed here: the options of parts (see
`train.py --choices=model.norm`) and the other fields of lm/config/fields.py. Start your own config
from this one:

    from configs import default
    def get_config():
        config = default.get_config()
        config.model.norm = 'layernorm'
        return config
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    config = ConfigDict()

    config.model = ConfigDict()
    config.model.d_model = 256
    config.model.n_layers = 3
    config.model.n_heads = (
        4  # also n_kv_heads, unless that is set: fewer is grouped-query attention
    )
    config.model.d_ff = 1024
    config.model.norm = 'rmsnorm'  # in the blocks; a name may have options: 'rmsnorm:scale=False'
    config.model.placement = 'pre'
    config.model.embedding_norm = 'none'  # any norm
    config.model.final_norm = 'auto'  # any norm; auto: model.norm if the placement has a final norm
    config.model.attention = 'softmax'
    config.model.qk_norm = 'rmsnorm'  # any norm; applied to queries and keys of each head
    config.model.mlp = 'auto'  # dense, moe, random_features; auto: as the placement needs
    config.model.activation = 'gelu'  # a gated one ('swiglu') adds a third matrix
    config.model.position = 'rope'
    config.model.reparam = 'auto'  # or several ('shared+sigma'), the nearest to the model first
    config.model.tie_embeddings = False
    config.model.bias = False  # of the matrices in the blocks
    config.model.readout = (
        'learned'  # or cosines; random, equiangular: with rows that are never trained
    )
    config.model.readout_bias = False
    config.model.logit_softcap = 0.0  # c * tanh(logits / c); 0: no softcap
    config.model.dtype = 'auto'  # of matmuls: bfloat16 on TPUs and GPUs, float32 on CPUs
    config.model.remat = 'none'
    config.model.scan_layers = False  # True: compile one layer for all, for deep models

    # No option of these is set: `train.py --choices` lists options and the parts that read them.
    config.norm = ConfigDict()  # for all norms that have the option
    config.attention = ConfigDict()
    config.mlp = ConfigDict()
    config.reparam = ConfigDict()

    config.loss = ConfigDict()
    config.loss.name = 'cross_entropy'

    config.optim = ConfigDict()
    config.optim.name = 'adamw'
    config.optim.lr = 5e-3
    config.optim.others = (
        'adamw'  # for embeddings, readout, vectors; optim.name: for hidden matrices
    )
    config.optim.schedule = 'warmup_cosine'
    config.optim.weight_decay = 0.1
    config.optim.decay_rule = 'decoupled'
    config.optim.clip_norm = 1.0  # float('inf') turns clipping off
    config.optim.average = 'none'  # of the weights, for evaluation; or ema, schedule_free
    config.optim.warmup_steps = 100

    config.scaling = ConfigDict()
    config.scaling.name = 'standard'
    config.scaling.init = 'fan_in'
    config.scaling.init_scale = 1.0
    config.scaling.embedding_std = 1.0  # None: as scaling.init
    config.scaling.zero_init = 'none'  # or query, readout, both

    config.data = ConfigDict()
    config.data.source = 'python'  # or text:GLOB, text:FOLDER, chat:GLOB, hub:NAME, tfds:NAME, ...
    # data.mixture replaces it by several sources with weights:
    # "{'wiki': (0.7, 'text:wiki/*.txt'), 'code': (0.3, ...)}".
    config.data.tokenizer = 'bpe:4096'  # or byte, hf:PATH
    config.data.text_field = 'text'  # in records: .jsonl, .csv, .parquet, tfds:
    config.data.seq_len = 256
    config.data.batch_size = 8  # sequences per step, over all devices and hosts
    config.data.packing = 'concat'  # or best_fit
    config.data.mask_documents = False  # True: attention stays within a document
    config.data.epochs = 1  # maximum passes over a source
    config.data.validation_fraction = 0.02  # of the documents
    config.data.validation_source = ''  # separate validation text, written like data.source
    config.data.invalid_utf8 = 'replace'  # and count the bytes; or stop
    config.data.missing_text = 'skip'  # and count the records without text; or stop
    config.data.seed = 0  # of the order of sequences
    config.data.prefetch = 8  # batches prepared in advance
    config.data.objective = 'causal'  # or a mixture: 'causal:0.5+span_corruption:0.5'
    config.data.cache_dir = ''  # empty: $XDG_CACHE_HOME/evenkeel, or ~/.cache/evenkeel

    config.train = ConfigDict()
    config.train.steps = 1500
    config.train.microbatches = 1
    config.train.eval_every = 250
    config.train.eval_batches = 0  # 0: the whole validation split
    config.train.eval_objectives = 'causal'  # or several: 'causal+infill'
    config.train.diagnose_every = 0  # steps between diagnostics of layers; 0: not compiled in
    config.train.profile = ''  # '100:3' traces steps 100 to 102
    config.train.init_from = ''  # a workdir or checkpoint with the initial weights
    config.train.trainable = 'all'  # or norms, or lora
    config.train.checkpoint_every = 125
    config.train.keep_last = 2
    config.train.keep_best = 1
    config.train.log_every = 20
    config.train.on_divergence = 'stop'  # or skip_step, rollback
    config.train.seed = 0  # of the initial parameters

    config.mesh = ConfigDict()
    # Devices along each axis. One may be -1: all remaining devices.
    config.mesh.data = -1  # rows of the batch
    config.mesh.fsdp = 1  # rows too, and parameters along model.d_model
    config.mesh.expert = 1  # rows too, and experts of model.mlp=moe
    config.mesh.context = 1  # tokens of a row
    config.mesh.tensor = 1  # heads, hidden features of MLPs, vocabulary
    config.mesh.run = -1  # devices for different runs of a sweep; -1: as many as have runs
    config.mesh.axes = 'given'  # or auto: choose axes of size 1 for memory and speed

    config.kernels = ConfigDict()
    config.kernels.implementation = 'auto'  # xla, xla_cpu, xla_tpu; or reference, cudnn, splash
    config.kernels.attention = 'auto'  # splash on TPUs, cudnn on GPUs if supported; or by name
    config.kernels.linear_attention = 'auto'  # as the implementation; or quadratic, chunked
    config.kernels.matmul = 'auto'  # or direct, einsum, narrow_first, wta_crs
    config.kernels.rms_norm = 'auto'  # as the implementation; or reference, pallas (TPU, GPU)
    config.kernels.softmax = 'auto'  # in dense attention, routers; or reference, pallas (TPU, GPU)
    config.kernels.cross_entropy = 'auto'  # as the implementation; or reference, pallas (TPU, GPU)
    config.kernels.run_axis = 'auto'  # runs of a sweep on one device: loop on a CPU, else vmap

    # Many runs: {'optim.lr': (1e-3, 3e-3), 'train.seed': (0, 1)} is four runs (lm/study).
    config.sweep = placeholder(object)
    # Fields to tune for each arm of the sweep: {'optim.lr': None} (lm/study).
    config.tune = placeholder(object)

    # Sections stay open for options that are left out here. Resolving the config refuses unknown
    # names.
    config.lock()
    for name, section in config.items():
        if name not in ('sweep', 'tune'):
            section.unlock()
    return config
