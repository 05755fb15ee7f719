"""The default run: a small pre-norm decoder on the Python standard library's own sources.

Question: does this machine train, end to end, on real text it already holds?
Command:  uv run train.py --config=configs/default.py
Cost:     under five minutes on two CPU cores, nothing downloaded.
Result:   1.33 bits per byte on held-out modules, where a 5-gram model of bytes has 1.75.

Every field there is stands here with its default; other configs start from this one:

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
    config.model.n_heads = 4
    config.model.n_kv_heads = 4  # fewer than n_heads: grouped-query attention
    config.model.d_ff = 1024
    config.model.norm = 'rmsnorm'  # of the blocks; at each site 'rmsnorm:scale=False' is a norm too
    config.model.placement = 'pre'
    config.model.mix_fraction = placeholder(float)  # of mix
    config.model.embedding_norm = 'none'  # any norm
    config.model.final_norm = 'auto'  # any norm; auto: model.norm where the placement has one
    config.model.embedding_scale = placeholder(bool)  # learned, sqrt(d_model); None: the norm's own
    config.model.attention = 'softmax'
    config.model.qk_norm = 'rmsnorm'  # any norm, of queries and keys, per head
    config.model.mlp = 'auto'  # dense or moe; auto: the placement's own, dense but for wide
    config.model.activation = 'gelu'  # a gated one ('swiglu') adds a third matrix
    config.model.position = 'rope'
    config.model.reparam = 'auto'  # or one or several ('shared+sigma'), nearest to the model first
    config.model.tie_embeddings = False
    config.model.bias = False  # of the matrices in the blocks
    config.model.readout_bias = False
    config.model.logit_softcap = 0.0  # c * tanh(logits / c); 0 leaves logits as they are
    config.model.dtype = 'float32'  # of the matmuls; parameters and statistics stay float32
    config.model.remat = 'none'
    config.model.scan_layers = False  # True compiles one layer for all: for deep models

    # Options of parts are None where they are as published; `train.py --choices` says how that is,
    # and which part reads which. One that no chosen part reads is refused.
    config.norm = ConfigDict()  # of all norms that have them
    config.norm.eps = placeholder(float)
    config.norm.scale = placeholder(bool)
    config.norm.bias = placeholder(bool)
    config.norm.groups = placeholder(int)
    config.norm.heads = placeholder(int)  # of seednorm
    config.norm.rank = placeholder(int)  # of gated_rmsnorm
    config.norm.alpha = placeholder(float)  # of dyt
    config.norm.alpha_attention = placeholder(float)
    config.norm.rescale = placeholder(bool)  # of l1norm
    config.norm.estimated = placeholder(bool)  # of batch_channel
    config.norm.ghost_batches = placeholder(int)
    config.norm.momentum = placeholder(float)  # of batch norms: how far an update moves statistics
    config.norm.ema_decay = placeholder(float)  # of powernorm, unified, removal: what it keeps
    config.norm.window = placeholder(int)  # of unified
    config.norm.warmup = placeholder(int)  # of powernorm and unified, in updates
    config.norm.filter_outliers = placeholder(bool)  # of unified
    config.norm.removal_start = placeholder(int)  # of the norms that are removed, in updates
    config.norm.removal_gap = placeholder(int)

    config.attention = ConfigDict()
    config.attention.norm_values = placeholder(bool)  # by model.qk_norm
    config.attention.qk_norm_over = placeholder(str)  # head, or model: all heads together
    config.attention.gate = placeholder(str)  # none, headwise or elementwise
    config.attention.softcap = placeholder(float)
    config.attention.logit_scale = placeholder(str)  # root, mup or learned
    config.attention.sinks = placeholder(str)  # none, off_by_one or learned
    config.attention.affine_scaled = placeholder(bool)
    config.attention.window = placeholder(int)  # of all layers, or all but each n-th
    config.attention.full_every = placeholder(int)
    config.attention.l2_scaled = placeholder(str)  # of l2
    config.attention.rope_base = placeholder(float)
    config.attention.rope_scaling = placeholder(str)  # none, linear or llama3
    config.attention.rope_factor = placeholder(float)  # of a scaling
    config.attention.rope_original_length = placeholder(int)  # of llama3
    config.attention.rope_low_frequency_factor = placeholder(float)
    config.attention.rope_high_frequency_factor = placeholder(float)
    config.attention.rope_fraction = placeholder(float)  # of the features of a head

    config.mlp = ConfigDict()
    config.mlp.n_experts = placeholder(int)  # of moe
    config.mlp.experts_per_token = placeholder(int)
    config.mlp.expert_capacity = placeholder(float)  # evaluation has no limit
    config.mlp.capacity_over = placeholder(str)
    config.mlp.alpha_dropout = placeholder(float)  # of selu, in training

    config.reparam = ConfigDict()
    config.reparam.roles = placeholder(str)  # which matrices, such as 'hidden+readout'
    config.reparam.gamma_start = placeholder(str)  # of sigma: sigma or one
    config.reparam.spectral_bound = placeholder(float)  # of spectral_cap
    config.reparam.compander_width = placeholder(float)  # of weight_compander
    config.reparam.compander_slope = placeholder(float)

    config.loss = ConfigDict()
    config.loss.name = 'cross_entropy'
    config.loss.chunk = placeholder(int)  # tokens whose logits are made at a time; 0: all
    config.loss.z_loss = placeholder(float)
    config.loss.label_smoothing = placeholder(float)
    config.loss.tau = placeholder(float)  # of comp_sum, adversarial_comp_sum
    config.loss.comp_sum_rho = placeholder(float)
    config.loss.adversarial_weight = placeholder(float)
    config.loss.adversarial_steps = placeholder(int)
    config.loss.gamma = placeholder(float)
    config.loss.dice_alpha = placeholder(float)
    config.loss.dice_smooth = placeholder(float)
    config.loss.dco_tries = placeholder(float)
    config.loss.spherical_a = placeholder(float)
    config.loss.spherical_b = placeholder(float)
    config.loss.ldr_lambda = placeholder(float)
    config.loss.ldr_margin = placeholder(float)
    config.loss.ldr_alpha = placeholder(float)
    config.loss.ldr_scores = placeholder(str)
    config.loss.balance_loss = placeholder(float)  # of experts

    config.optim = ConfigDict()
    config.optim.name = 'adamw'
    config.optim.lr = 5e-3
    config.optim.others = 'adamw'  # of embeddings, readout and vectors; optim.name has the matrices
    config.optim.others_lr = placeholder(float)
    config.optim.embedding_gradient_shrink = placeholder(float)
    config.optim.update_clip = placeholder(float)
    config.optim.ghost_radius = placeholder(float)
    config.optim.match_rms = placeholder(float)
    config.optim.schedule = 'warmup_cosine'
    config.optim.weight_decay = 0.1
    config.optim.decay_rule = 'decoupled'
    config.optim.clip_norm = 1.0  # float('inf') turns clipping off
    config.optim.average = 'none'  # of the weights, for evaluation: or ema, schedule_free
    config.optim.average_decay = placeholder(float)  # of ema
    config.optim.schedule_free_beta = placeholder(float)
    config.optim.schedule_free_power = placeholder(float)
    config.optim.schedule_free_lr_power = placeholder(float)
    # Of schedules, then of optimizers.
    config.optim.warmup_steps = 100
    config.optim.decay_timescale = placeholder(float)  # of decay_rule=timescale, in runs
    config.optim.cycles = placeholder(int)  # of cyclic
    config.optim.decay_fraction = placeholder(float)  # of the steps; of warmup_stable_decay
    config.optim.decay_power = placeholder(float)  # of power
    config.optim.decay_shape = placeholder(str)  # of warmup_stable_decay: linear or sqrt
    config.optim.final_lr_fraction = placeholder(float)
    config.optim.inverse_sqrt_steps = placeholder(int)  # before the decay of inverse_sqrt
    config.optim.adafactor_absolute = placeholder(bool)
    config.optim.adafactor_clip = placeholder(float)
    config.optim.adafactor_decay = placeholder(float)
    config.optim.adafactor_eps = placeholder(float)
    config.optim.adafactor_min_size = placeholder(int)
    config.optim.adamp_decay_ratio = placeholder(float)  # of adamp, sgdp
    config.optim.adamp_delta = placeholder(float)
    config.optim.apollo_factors = placeholder(str)  # one a channel, or one a tensor
    config.optim.apollo_scale = placeholder(float)
    config.optim.aro_map = placeholder(str)
    config.optim.aro_scale = placeholder(float)
    config.optim.aro_steps = placeholder(int)
    config.optim.auon_form = placeholder(str)
    config.optim.auon_gamma = placeholder(float)
    config.optim.b1 = placeholder(float)
    config.optim.b2 = placeholder(float)
    config.optim.cge_at_a_time = placeholder(int)
    config.optim.cge_coordinates = placeholder(int)  # 0: all
    config.optim.cge_step = placeholder(float)
    config.optim.conda_every = placeholder(int)
    config.optim.conda_scale = placeholder(float)
    config.optim.dampening = placeholder(float)
    config.optim.eps = placeholder(float)
    config.optim.galore_scale = placeholder(float)  # of fira too
    config.optim.gauss_newton_gamma = placeholder(float)
    config.optim.gauss_newton_products = placeholder(int)
    config.optim.gauss_newton_tries = placeholder(int)
    config.optim.growth_limit = placeholder(float)  # of fira and apollo
    config.optim.momentum = placeholder(float)
    config.optim.muon_power_steps = placeholder(int)
    config.optim.muon_scale = placeholder(str)
    config.optim.muon_steps = placeholder(int)
    config.optim.nesterov = placeholder(bool)
    config.optim.projection_every = placeholder(int)
    config.optim.rank = placeholder(int)  # of galore, fira and apollo
    config.optim.scale_vector_factor = placeholder(float)
    config.optim.shampoo_eps = placeholder(float)
    config.optim.shampoo_every = placeholder(int)
    config.optim.shampoo_graft = placeholder(bool)
    config.optim.soap_every = placeholder(int)
    config.optim.soap_max_dim = placeholder(int)
    config.optim.soap_sides = placeholder(str)
    config.optim.sophia_eps = placeholder(float)
    config.optim.sophia_every = placeholder(int)
    config.optim.sophia_gamma = placeholder(float)
    config.optim.sven_group = placeholder(int)  # sequences
    config.optim.sven_k = placeholder(int)  # 0: all
    config.optim.sven_kappa = placeholder(float)
    config.optim.sven_rtol = placeholder(float)

    config.scaling = ConfigDict()
    config.scaling.name = 'standard'
    config.scaling.base_width = placeholder(int)  # of the model whose rates these are to be
    config.scaling.base_depth = placeholder(int)
    config.scaling.base_heads = placeholder(int)
    config.scaling.depth_alpha = placeholder(float)  # of complete_p
    config.scaling.init = 'fan_in'
    config.scaling.init_scale = 1.0
    config.scaling.embedding_std = 1.0  # None: that of scaling.init
    config.scaling.zero_init = 'none'  # or query, readout, both

    config.data = ConfigDict()
    config.data.source = 'python'  # or text:GLOB, tfds:NAME, synthetic:NAME
    # Instead of it several, with weights: "{'wiki': (0.7, 'text:wiki/*.txt'), 'code': (0.3, ...)}".
    config.data.mixture = placeholder(str)
    config.data.tokenizer = 'bpe:4096'  # or byte, hf:PATH
    config.data.text_field = 'text'  # of .jsonl, .parquet and tfds: records
    config.data.seq_len = 256
    config.data.batch_size = 8  # sequences a step, over all devices and hosts
    config.data.packing = 'concat'  # or best_fit
    config.data.mask_documents = False  # True: attention stays within a document
    config.data.epochs = 1  # of each source; more must be asked for
    config.data.validation_fraction = 0.02  # of the documents
    config.data.invalid_utf8 = 'replace'  # and count, or stop
    config.data.seed = 0  # of the order of sequences
    config.data.prefetch = 8  # batches made ahead
    config.data.objective = 'causal'  # or a mixture: 'causal:0.5+span_corruption:0.5'
    config.data.loss_on = placeholder(str)  # of span_corruption and infill: document or holes
    config.data.mask_ratio_least = placeholder(float)  # of span_corruption: share of text in holes
    config.data.mask_ratio_most = placeholder(float)
    config.data.span_least = placeholder(int)
    config.data.span_most = placeholder(int)
    config.data.masks = placeholder(int)
    config.data.cache_dir = ''  # empty: $XDG_CACHE_HOME/evenkeel, or ~/.cache/evenkeel

    config.train = ConfigDict()
    config.train.steps = 1500
    config.train.microbatches = 1
    config.train.eval_every = 250
    config.train.eval_batches = 0  # 0: the whole validation split
    config.train.eval_objectives = 'causal'  # or several: 'causal+infill'
    config.train.diagnose_every = 0  # what each layer does, from step 0 on; 0: not compiled in
    config.train.init_from = ''  # a workdir or checkpoint whose weights to start from
    config.train.trainable = 'all'  # or norms
    config.train.checkpoint_every = 125
    config.train.keep_last = 2
    config.train.keep_best = 1
    config.train.log_every = 20
    config.train.on_divergence = 'stop'  # or skip_step, rollback
    config.train.seed = 0  # of the initial parameters

    config.mesh = ConfigDict()
    # Devices along each axis; one may be -1: every device that the others leave.
    config.mesh.data = -1  # rows of the batch
    config.mesh.fsdp = 1  # rows too, and parameters along model.d_model
    config.mesh.expert = 1  # rows too, and experts of model.mlp=moe
    config.mesh.context = 1  # tokens of a row
    config.mesh.tensor = 1  # heads, hidden features of MLPs, vocabulary
    config.mesh.run = -1  # devices that train different runs of a sweep; -1: as many as have work
    config.mesh.axes = 'given'  # or auto: those that are 1 become what fits and sends least

    config.kernels = ConfigDict()
    config.kernels.implementation = 'auto'  # xla_cpu, xla; or reference, cudnn (GPU), splash (TPU)
    config.kernels.attention = 'auto'  # of the implementation; or a kernel by name
    config.kernels.linear_attention = 'auto'  # of the implementation; or quadratic, chunked
    config.kernels.matmul = 'auto'  # of the implementation; or direct, narrow_first, wta_crs
    config.kernels.rms_norm = 'auto'  # of the implementation; or reference, pallas (TPU, GPU)
    config.kernels.softmax = 'auto'  # of dense attention, routers; or reference, pallas (TPU, GPU)
    config.kernels.cross_entropy = 'auto'  # of the implementation; or reference, pallas (TPU, GPU)
    config.kernels.wta_crs_ratio = placeholder(float)  # of the tokens, in gradients of weights
    config.kernels.wta_crs_least = placeholder(int)  # tokens
    config.kernels.run_axis = 'auto'  # runs of a sweep on one device: loop on a CPU, else vmap

    # Many runs: {'optim.lr': (1e-3, 3e-3), 'train.seed': (0, 1)} is four of them (lm/sweep).
    config.sweep = placeholder(object)

    return config.lock()
