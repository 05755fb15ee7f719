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
    config.model.n_heads = 4  # n_kv_heads defaults to the same; fewer give grouped-query attention
    config.model.d_ff = 1024
    config.model.norm = 'rmsnorm'  # in the blocks; a name may have options: 'rmsnorm:scale=False'
    config.model.placement = 'pre'
    config.model.embedding_norm = 'none'  # any norm
    config.model.final_norm = 'auto'  # any norm; auto: model.norm, if the placement has a final one
    config.model.attention = 'softmax'
    config.model.qk_norm = 'rmsnorm'  # any norm; applied to queries and keys of each head
    config.model.mlp = 'auto'  # dense, moe, random_features; auto: chosen by the placement
    config.model.activation = 'gelu'  # a gated activation ('swiglu') adds a third matrix
    config.model.position = 'rope'
    config.model.reparam = 'auto'  # or several ('shared+sigma'), the one closest to the model first
    config.model.tie_embeddings = False
    config.model.bias = False  # for the matrices in the blocks
    config.model.readout = (
        'learned'  # or cosines; random and equiangular have rows that are never trained
    )
    config.model.readout_bias = False
    config.model.logit_softcap = 0.0  # c * tanh(logits / c); 0: no softcap
    config.model.dtype = 'auto'  # of matmuls: bfloat16 on TPUs and GPUs, float32 on CPUs
    config.model.remat = 'none'
    config.model.scan_layers = False  # True: compile one layer for all, for deep models

    # No options are set here; `train.py --choices` lists them with the parts that use them.
    config.norm = ConfigDict()  # for all norms with the option
    config.attention = ConfigDict()
    config.mlp = ConfigDict()
    config.reparam = ConfigDict()

    config.loss = ConfigDict()
    config.loss.name = 'cross_entropy'

    config.optim = ConfigDict()
    config.optim.name = 'adamw'
    config.optim.lr = 5e-3
    config.optim.others = 'adamw'  # embeddings, readout, vectors; optim.name is for hidden matrices
    config.optim.schedule = 'warmup_cosine'
    config.optim.weight_decay = 0.1
    config.optim.decay_rule = 'decoupled'
    config.optim.clip_norm = 1.0  # float('inf') turns clipping off
    config.optim.average = 'none'  # weights for evaluation; or ema, schedule_free
    config.optim.warmup_steps = 100

    config.scaling = ConfigDict()
    config.scaling.name = 'standard'
    config.scaling.init = 'fan_in'
    config.scaling.init_scale = 1.0
    config.scaling.embedding_std = 1.0  # None: by scaling.init
    config.scaling.zero_init = 'none'  # or query, readout, both

    config.data = ConfigDict()
    config.data.source = 'python'  # or text:GLOB, text:FOLDER, chat:GLOB, hub:NAME, tfds:NAME, ...
    # data.mixture replaces it with several weighted sources:
    # "{'wiki': (0.7, 'text:wiki/*.txt'), 'code': (0.3, ...)}".
    config.data.tokenizer = 'bpe:4096'  # or byte, hf:PATH
    config.data.text_field = 'text'  # field of records: .jsonl, .csv, .parquet, tfds:
    config.data.seq_len = 256
    config.data.batch_size = 8  # sequences per step, summed over devices and hosts
    config.data.packing = 'concat'  # or best_fit
    config.data.mask_documents = False  # True: attention stays within each document
    config.data.epochs = 1  # maximum passes over a source
    config.data.validation_fraction = 0.02  # share of the documents
    config.data.validation_source = ''  # separate validation text, written like data.source
    config.data.invalid_utf8 = 'replace'  # and count the bytes; or stop
    config.data.missing_text = 'skip'  # and count the records without text; or stop
    config.data.seed = 0  # for the order of sequences
    config.data.prefetch = 8  # batches prepared in advance
    config.data.objective = 'causal'  # or a mixture: 'causal:0.5+span_corruption:0.5'
    config.data.cache_dir = ''  # empty: $XDG_CACHE_HOME/evenkeel, or ~/.cache/evenkeel

    config.train = ConfigDict()
    config.train.steps = 1500  # or train.seconds, which sets it from the time of a step
    config.train.microbatches = 1
    config.train.eval_every = 250
    config.train.eval_batches = 0  # 0: the whole validation split
    config.train.eval_objectives = 'causal'  # or several: 'causal+infill'
    config.train.diagnose_every = 0  # steps between layer diagnostics; 0: not compiled in
    config.train.profile = ''  # '100:3' traces steps 100 to 102
    config.train.init_from = ''  # workdir or checkpoint with the initial weights
    config.train.branch_from = ''  # RUN@STEP to continue, with optimizer, under another config
    config.train.trainable = 'all'  # or norms, or lora
    config.train.checkpoint_every = 125
    config.train.keep_last = 2
    config.train.keep_best = 1
    config.train.checkpoint_steps = ''  # checkpoints that stay: '100,200', 'log+before_decay'
    config.train.log_every = 20
    config.train.on_divergence = 'stop'  # or skip_step, rollback
    config.train.seed = 0  # for the initial parameters

    config.eval = ConfigDict()  # during training, besides the validation split
    # eval.texts names further held-out texts, "{'wiki': 'text:wiki/*.txt'}", and eval.texts_every
    # their steps.
    config.eval.texts_tokens = 131_072  # of each text; 0: all
    # eval.suites names suites, 'minimal_pairs:blimp', and eval.suites_every their steps.

    config.mesh = ConfigDict()
    # Devices along each axis. One of them may be -1: all remaining devices.
    config.mesh.data = -1  # batch rows
    config.mesh.fsdp = 1  # batch rows, and parameters along model.d_model
    config.mesh.expert = 1  # batch rows, and experts of model.mlp=moe
    config.mesh.context = 1  # tokens of each row
    config.mesh.tensor = 1  # heads, hidden features of MLPs, vocabulary
    config.mesh.run = -1  # runs of a sweep; -1: as many devices as there are runs for
    config.mesh.axes = 'given'  # or auto: choose axes of size 1 for memory and speed

    config.kernels = ConfigDict()
    config.kernels.implementation = 'auto'  # xla, xla_cpu, xla_tpu; or reference, cudnn, splash
    config.kernels.attention = 'auto'  # splash on TPUs and cudnn on GPUs, if supported; or a name
    config.kernels.linear_attention = 'auto'  # by kernels.implementation; or quadratic, chunked
    config.kernels.recurrence = 'auto'  # by kernels.implementation; or reference, chunked
    config.kernels.matmul = 'auto'  # or einsum, ..., wta_crs, or few bits: fp8_tensorwise, nvfp4
    config.kernels.rms_norm = 'auto'  # by kernels.implementation; or reference, pallas (TPU, GPU)
    config.kernels.softmax = 'auto'  # dense attention, routers; or reference, pallas (TPU, GPU)
    config.kernels.cross_entropy = 'auto'  # as rms_norm
    config.kernels.run_axis = 'auto'  # runs on the same device: loop on CPUs, else vmap

    # Many runs: {'optim.lr': (1e-3, 3e-3), 'train.seed': (0, 1)} gives four runs (lm/study).
    config.sweep = placeholder(object)
    # Fields to tune in each arm of the sweep: {'optim.lr': None} (lm/study).
    config.tune = placeholder(object)

    # Sections stay open for options that do not appear here. Unknown names are refused when the
    # config is resolved.
    config.lock()
    for name, section in config.items():
        if name not in ('sweep', 'tune'):
            section.unlock()
    return config
