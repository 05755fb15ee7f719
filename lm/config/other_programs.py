"""Names that nanoGPT, torchtitan, Hugging Face, MaxText, Levanter and NanoDO have for what is here,
and for what is not. They are refused; the answer has the flags that work, with the values given.
"""

import math
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path

from modules.choices import USUAL_NAMES, closest

# {name: fields here}; where one flag is to be written it is of the first. A name may begin with
# sections, where without them it means another thing elsewhere.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    name: tuple(fields.split())
    for fields, names in {
        'attention.rope_base': 'rope.theta rope_max_timescale rope_theta',
        'attention.no_rope_every': 'no_rope_layer_interval',
        'attention.rope_local_base': 'rope_local_base_freq',
        'attention.rope_fraction': 'partial_rotary_factor rotary_pct',
        'attention.window': 'sliding_window sliding_window_size',
        'data.batch_size': 'batch config.batch_size device_batch_size '
        'global_batch_size local_batch_size micro_batch_size per_device_batch_size '
        'per_device_train_batch_size train_batch_size',
        'data.epochs': 'num_epochs num_train_epochs train_epochs',
        'data.seed': 'data_seed data_shuffle_seed',
        'data.seq_len': 'block_size context_length max_length max_position_embeddings '
        'max_seq_len max_seq_length max_target_length model.l model_max_length sequence_length '
        'train_seq_len',
        'data.source': 'data.id dataset dataset_name dataset_path ds_name hf_path hf_train_files '
        'train_file train_urls',
        'data.mixture': 'sources',
        'data.text_field': 'text_column text_key',
        'data.tokenizer': 'data.tokenizer hf_assets_path model.v tokenizer_name tokenizer_path '
        'vocab_size',
        'kernels.attention': 'attn_backend attn_implementation',
        'loss.label_smoothing': 'label_smoothing_factor',
        'loss.z_loss': 'z_loss_weight',
        'mesh.context': 'context_parallel_degree ici_context_parallelism ici_sequence_parallelism',
        'mesh.data': 'data_parallel_replicate_degree dcn_data_parallelism ici_data_parallelism '
        'replica_dcn_axis_size replica_ici_axis_size',
        'mesh.expert': 'expert_parallel_degree ici_expert_parallelism',
        'mesh.fsdp': 'data_parallel_shard_degree dcn_fsdp_parallelism fsdp_axis fsdp_enabled '
        'ici_fsdp_parallelism',
        'mesh.tensor': 'ici_tensor_parallelism model_axis_size tensor_parallel_degree tp',
        'mlp.experts_per_token': 'num_experts_per_tok',
        'mlp.n_experts': 'num_experts',
        'model.activation': 'activation_function hidden_act mlp_activations',
        'model.bias': 'use_bias',
        'model.qkv_bias': 'add_qkv_bias',
        'model.d_ff': 'base_mlp_dim intermediate_dim intermediate_size model.f',
        'model.d_model': 'base_emb_dim dim hidden_dim hidden_size model.d n_embd width',
        'model.attention_dropout': 'attention_probs_dropout_prob attn_dropout attn_pdrop',
        'model.dropout': 'dropout_rate hidden_dropout hidden_dropout_prob resid_dropout '
        'resid_pdrop',
        'model.dtype': 'bf16 fp16 mixed_precision_param mp torch_dtype',
        'model.embedding_dropout': 'embd_dropout embd_pdrop embed_pdrop',
        'model.head_dim': 'd_head d_kv dim_head kv_channels',
        'model.n_heads': 'base_num_query_heads model.h n_head num_attention_heads num_heads',
        'model.n_kv_heads': 'base_num_kv_heads num_key_value_heads num_kv_heads',
        'model.n_layers': 'base_num_decoder_layers depth layers model.n n_layer num_hidden_layers '
        'num_layers',
        'model.placement': 'hybrid_norm',
        'model.qk_norm': 'qk_layernorm',
        'model.reparam': 'lora peft use_lora use_peft',
        'model.remat': 'activation_checkpoint.mode gradient_checkpointing remat_policy',
        'model.tie_embeddings': 'logits_via_embedding tie_word_embeddings weight_tying',
        'norm.eps optim.eps': 'epsilon',
        'norm.scale': 'use_layer_norm_weight',
        'norm.eps': 'layer_norm_epsilon normalization_layer_epsilon rms_norm_eps',
        'optim.b1': 'adam_b1 adam_beta1 beta1',
        'optim.b2': 'adam_b2 adam_beta2 beta2',
        'optim.average': 'model_averaging.type',
        'optim.clip_norm': 'clip_by_global_norm grad_clip gradient_clip_val '
        'gradient_clipping_threshold max_grad_norm max_norm',
        'optim.decay_rule': 'adamc_weight_decay independent_weight_decay',
        'optim.eps': 'adam_eps adam_epsilon opt.eps optimizer.eps optimizer.epsilon',
        'optim.final_lr_fraction': 'cosine_learning_rate_final_fraction min_lr_factor min_lr_ratio',
        'optim.lr': 'learning_rate peak_learning_rate',
        'optim.momentum': 'opt.momentum optimizer.momentum',
        'optim.name': 'opt_type optim optimizer optimizer.name optimizer.type optimizer_type',
        'optim.schedule': 'decay_lr decay_type lr_schedule lr_scheduler lr_scheduler_type',
        'optim.warmup_steps norm.warmup': 'warmup',
        'optim.warmup_steps': 'num_warmup_steps warmup_iters',
        'optim.weight_decay': 'adam_weight_decay decay wd',
        'reparam.alpha': 'lora_alpha',
        'reparam.rank': 'lora_r lora_rank',
        'reparam.rslora': 'use_rslora',
        'train.checkpoint_every': 'checkpoint.interval checkpoint_every_steps checkpoint_period '
        'save_every save_interval save_steps',
        'train.eval_batches': 'config.eval_steps eval_iters eval_steps_per_eval max_eval_batches '
        'maxtext.eval_steps validation.steps',
        'train.eval_every': 'eval_every_steps eval_interval eval_steps steps_per_eval '
        'validation.freq',
        'train.init_from': 'checkpoint_restore_dir initial_load_path initialize_from '
        'initialize_from_checkpoint_path load_checkpoint_path load_parameters_path '
        'model_name_or_path pretrained',
        'train.keep_last': 'keep_latest_k max_to_keep save_total_limit',
        'train.log_every': 'log_freq log_interval log_period logging_steps '
        'write_perf_metrics_every_steps write_train_metrics_every_steps',
        'train.microbatches': 'accumulation_steps grad_accum_steps grad_accumulation_steps '
        'gradient_accumulation gradient_accumulation_steps',
        'train.seed': 'init_weights_seed seed',
        'train.steps': 'max_iters max_steps max_train_steps num_iterations num_steps '
        'num_train_steps num_training_steps total_steps train_steps',
    }.items()
    for name in names.split()
}
# {name of what is given in another unit: (field here, field whose value tells how many)}
SHARES: Mapping[str, tuple[str, str]] = {
    'final_learning_rate': ('optim.final_lr_fraction', 'optim.lr'),
    'min_lr': ('optim.final_lr_fraction', 'optim.lr'),
    'optimizer.warmup': ('optim.warmup_steps', 'train.steps'),
    'warmup_ratio': ('optim.warmup_steps', 'train.steps'),
    'warmup_steps_fraction': ('optim.warmup_steps', 'train.steps'),
}
# Names of batches that microbatches are parts of; under other names a batch is a microbatch.
OF_A_STEP = ('config.batch_size', 'global_batch_size', 'train_batch_size')
# {name: a flag of a program here that is no field of the config}
OWN: Mapping[str, str] = {
    'base_output_directory': 'workdir',
    'base_path': 'workdir',
    'checkpoint.folder': 'workdir',
    'checkpoint_dir': 'workdir',
    'dump_folder': 'workdir',
    'max_new_tokens': 'tokens',
    'out_dir': 'workdir',
    'output_dir': 'workdir',
    'run_name': 'workdir',
    'save_dir': 'workdir',
    'trainer.id': 'workdir',
    'work_dir': 'workdir',
}
ACTIVATIONS = {'gelu': 'gelu_exact', 'gelunew': 'gelu', 'gelupytorchtanh': 'gelu', 'silu': 'swiglu'}
TRAINED = {'train.trainable': 'lora'}
WITH_LORA = {'model.reparam': 'lora'} | TRAINED
OF_LORA = {'': 'lora', 'true': 'lora', 'lora': 'lora', 'false': 'none'}
BFLOAT16 = {'': 'bfloat16', 'true': 'bfloat16', 'false': 'float32'}
# {name or field: {value there, in letters and digits: value here}}; '' is a flag without a value.
VALUES: Mapping[str, Mapping[str, str]] = {
    'activation_function': ACTIVATIONS,
    'hidden_act': ACTIVATIONS,
    'bf16': BFLOAT16,
    'fp16': BFLOAT16,
    'adamc_weight_decay': {'': 'adamc', 'true': 'adamc', 'false': 'decoupled'},
    'decay_lr': {'': 'warmup_cosine', 'true': 'warmup_cosine', 'false': 'constant'},
    'hybrid_norm': {'': 'peri', 'true': 'peri', 'false': 'pre'},
    'independent_weight_decay': {'': 'independent', 'true': 'independent', 'false': 'decoupled'},
    'mlp_activations': {'silulinear': 'swiglu', 'gelulinear': 'geglu'},
    'mesh.fsdp': {'': '-1', 'fullshard': '-1', 'true': '-1', 'false': '1', 'null': '1'},
    'model.dtype': {'f32': 'float32', 'pf32cf32': 'float32'}
    | dict.fromkeys(('bf16', 'half', 'pf32cbfloat16', 'pf32cbf16', 'pf32cf16'), 'bfloat16'),
    **dict.fromkeys(('lora', 'peft', 'use_lora', 'use_peft'), OF_LORA),
    'model.remat': {'': 'full', 'true': 'full', 'selective': 'dots', 'minimal': 'dots'}
    | {'false': 'none', 'off': 'none'},
    'optim.clip_norm': dict.fromkeys(('0', '00', 'none', 'null'), 'inf'),
    'optim.name': dict.fromkeys(('adamwtorch', 'adamwtorchfused'), 'adamw'),
    'optim.schedule': {
        'constantwithoutwarmup': 'constant',
        'constantwithwarmup': 'constant',
        'rsqrt': 'inverse_sqrt',
    },
}
# {name, or value in letters and digits, there: {field: its value}} that is to be set too.
ALSO: Mapping[str, Mapping[str, str]] = {
    'constantwithoutwarmup': {'optim.warmup_steps': '0'},
    'cycles': {'optim.schedule': 'cyclic'},
    **dict.fromkeys(('lora_alpha', 'lora_r', 'lora_rank', 'use_rslora'), WITH_LORA),
    **dict.fromkeys(('lora', 'peft', 'use_lora', 'use_peft'), TRAINED),
    'replica_dcn_axis_size': {'mesh.fsdp': '-1'},
    'replica_ici_axis_size': {'mesh.fsdp': '-1'},
    'rsqrt': {'optim.inverse_sqrt_steps': '1'},
}
# {name: what its value is here}
SPELT: Mapping[str, str] = {
    'data.tokenizer': 'hf:{}',
    'dataset_path': 'text:{}',
    'ds_name': 'tfds:{}',
    'fsdp_axis': '-1',
    'hf_assets_path': 'hf:{}',
    'hf_train_files': 'text:{}',
    'model.v': 'bpe:{}',
    'tokenizer_name': 'hf:{}',
    'tokenizer_path': 'hf:{}',
    'train_file': 'text:{}',
    'train_urls': 'text:{}',
    'vocab_size': 'bpe:{}',
}
A_STEP = 'data.batch_size counts the sequences of a step over all devices.'
WEIGHTS = 'It reads weights alone; with all else the same --workdir goes on.'
NOTES: Mapping[str, str] = {
    'checkpoint_restore_dir': WEIGHTS,
    'initialize_from': WEIGHTS,
    'load_checkpoint_path': WEIGHTS,
    'config_path': 'A config is a Python file with get_config().',
    'data.tokenizer': 'Nothing is downloaded: hf: has the path of a tokenizer.json.',
    'ds_name': 'TFDS reads what is prepared in TFDS_DATA_DIR.',
    'train_urls': 'One glob names all files.',
    'trainer.seed': 'The order of sequences has data.seed.',
    'local_batch_size': A_STEP,
    'num_epochs': 'A run ends after train.steps.',
    'num_train_epochs': 'A run ends after train.steps.',
    'per_device_batch_size': A_STEP,
    'per_device_train_batch_size': A_STEP,
}
# {configs/NAME.py: what models of that size are called elsewhere}
PRESETS = {
    'default': 'debug tiny',
    'llama_1b': '1b',
    'llama_8b': '8b 7b',
    'llama_124m': '124m gpt2 llama',
}
OF_MODELS = (
    'config_path',
    'decoder_block',
    'flavor',
    'model',
    'model.name',
    'model.type',
    'model_name',
    'model_size',
    'model_type',
)
OF_HUB = ('data.id', 'dataset_name', 'hf_path')  # names whose values are OWNER/NAME of data sets
CORPORA: Mapping[str, str] = {
    'c4': 'allenai/c4',
    'fineweb': 'HuggingFaceFW/fineweb',
    'openwebtext': 'Skylion007/openwebtext',
    'shakespeare': 'karpathy/tiny_shakespeare',
    'slimpajama': 'cerebras/SlimPajama-627B',
    'tinystories': 'roneneldan/TinyStories',
    'wikipedia': 'wikimedia/wikipedia',
    'wikitext': 'Salesforce/wikitext',
}
# {what is to be said: names, in letters and digits, of what is not here}
ABSENT: Mapping[str, str] = {
    name: words
    for words, names in {
        'dropout is on where --config.model.dropout is not 0': 'enabledropout',
        'dropout before the factors of LoRA is no map of weights, and not here': 'loradropout',
        'what LoRA leaves alone is kept in float32, not in fewer bits: --config.model.reparam=lora '
        '--config.train.trainable=lora': 'qlora',
        'every step is compiled; there is nothing to set': (
            'compile compileenable torchcompile jit usecompile'
        ),
        'nothing is sent anywhere; WORKDIR/metrics.jsonl has every row, and python -m eval.report '
        '--workdir=WORKDIR makes a page of it': (
            'wandb wandblog wandbproject wandbrunname wandbentity usewandb enablewandb reportto '
            'tensorboard enabletensorboard savetbfolder tensorboarddir loggingdir tracker '
            'writetoxmmeasurements'
        ),
        '--config.kernels.attention=auto, the default, is cudnn (NVIDIA, bfloat16) or splash (TPU) '
        'where they serve, which are fused, and elsewhere blocked, in bounded memory': (
            'flash flashattn flashattention flashattention2 flashattention3 sdpa useflashattn '
            'autoselected dotproduct xformers flexattention flexattn useflexattn jaxflash nvte '
            'vanilla useflashattention flashattentionblocksize'
        ),
        'nothing is downloaded: python -m eval.convert import-hf DIR --out=RUN reads a folder that '
        'transformers has saved, and --config.train.init_from=RUN starts from it; '
        "configs/llama_124m.py is a model of GPT-2's size, untrained": (
            'gpt2 gpt2medium gpt2large gpt2xl initializefromhf'
        ),
        'the same command with the same --workdir goes on where it stopped': (
            'resume autoresume resumefromcheckpoint loadstep checkpointloadstep enablecheckpoint '
            'enablecheckpointing checkpointenable checkpointenablecheckpoint asynccheckpointing '
            'alwayssavecheckpoint overwriteoutputdir loadcheckpoint configcheckpoint'
        ),
        'a run starts from random weights unless --config.train.init_from is given': 'scratch',
        'JAX takes the devices that are there; JAX_PLATFORMS=cpu in the environment names others': (
            'device backend usecpu nocuda hardware ddp ddpbackend accelerator requireaccelerator'
        ),
        'steps are what everything is counted in: --config.train.eval_every, '
        '--config.train.checkpoint_every and --config.train.log_every': (
            'evaluationstrategy evalstrategy savestrategy loggingstrategy validationenable'
        ),
        'a warm-up is given in steps: --config.optim.warmup_steps': (
            'warmupratio warmupstepsfraction optimizerwarmup'
        ),
        'a warm-up begins at optim.lr / --config.optim.warmup_steps': 'initlearningrate',
        'a rate that stays and then falls is --config.optim.schedule=warmup_stable_decay with '
        '--config.optim.decay_fraction, a share of the steps': 'optimizerdecay optimizercooldown',
        'that optimizer is not here; train.py --choices=optim.name lists those that are': (
            'adopt cautious kron mars mini rmsprop scion'
        ),
        'weights are drawn with a deviation that follows from their shape: --config.scaling.init, '
        'times --config.scaling.init_scale': 'initializerrange initstd',
        'a checkpoint is written every so many steps, not minutes: '
        '--config.train.checkpoint_every': 'checkpointersaveinterval',
        'a step is done in --config.train.microbatches parts: data.batch_size over devices times '
        'the sequences that one has at a time': 'perdeviceparallelism',
        '--config.mesh.tensor devices share heads, hidden features of MLPs and the vocabulary': (
            'tensorparallelaxes axisresources parameteraxisresources'
        ),
        'sources and their weights are in --config.data.mixture': 'trainweights dataconfigs',
        'a tokenizer is trained on the text (bpe:SIZE), of bytes (byte), or a tokenizer.json '
        '(hf:PATH): --config.data.tokenizer': 'vocabpath',
        'sequences are shuffled, in an order that --config.data.seed draws': 'shuffle',
        'matrices and embeddings decay, and vectors do not; --config.optim.decay_rule says by what '
        'share': 'weightdecaymodules defaultweightdecaymask weightdecayexclusionnames',
        '--config.train.on_divergence says what is done about a loss that is not finite': (
            'crashonnan crashoninf skipbadsteps'
        ),
        'checkpoints stay in the form of this program': 'hfsavepath hfupload hfsavesteps',
        'a schedule ends at --config.train.steps': (
            'lrdecayiters lrdecaysteps learningrateschedulesteps decayratio'
        ),
        'a schedule ends at a share of optim.lr: --config.optim.final_lr_fraction': (
            'minlr finallearningrate'
        ),
        'nothing is split over layers; --config.mesh.fsdp and --config.mesh.tensor split each': (
            'pipelineparalleldegree icipipelineparallelism dcnpipelineparallelism pp'
        ),
        '--config.mesh.fsdp splits parameters, gradients and the optimizer over devices': (
            'deepspeed zerostage fsdpconfig sharding'
        ),
        'model.dtype is bfloat16 or float32; nothing is computed in fewer bits': (
            'quantization int8 fp8 float8 loadin8bit loadin4bit enablefp8linear usefp8'
        ),
        'parameters and statistics are float32, and model.dtype is what products are computed in': (
            'weightdtype gradscaler lossscale tf32'
        ),
        'batches are made ahead of the step: --config.data.prefetch': (
            'dataloadernumworkers numworkers dataloaderpinmemory pygrainworkercount '
            'pygrainworkerbuffersize'
        ),
        'a config is a Python file with get_config(): --config=configs/default.py': (
            'configfile jobconfigfile'
        ),
        'train.py trains and evaluates; python -m eval --checkpoint=WORKDIR evaluates alone': (
            'dotrain doeval evalonly dopredict evalharness evalharnesssteps'
        ),
        'text is read from files, and a part of it held out: --config.data.source=text:PATH and '
        '--config.data.validation_fraction': 'datasettype validationfile valfile testfile '
        'validationurls evalsplit',
        'evaluation has batches of --config.data.batch_size and --config.data.seq_len too': (
            'evalbatchsize perdeviceevalbatchsize perdeviceevalparallelism evalmaxtargetlength'
        ),
        'the best checkpoints stay as well: --config.train.keep_best': 'loadbestmodelatend',
        'python -m eval.generate --checkpoint=WORKDIR --tokens=N samples from a run': (
            'maxnewtokens numsamples'
        ),
        '--config.train.profile=STEP:COUNT traces steps, and says where their time goes': (
            'enableprofiling profiler profilerstart'
        ),
        '--config.train.diagnose_every shows what each layer does': 'loginternalmetrics',
    }.items()
    for name in names.split()
}


def preset(text: str) -> str:
    """Returns the config here for a model that is called `text` elsewhere."""
    found = [name for name, sizes in PRESETS.items() if any(s in word(text) for s in sizes.split())]
    return found[0] if found else 'default'


def word(name: str) -> str:
    """Returns a name in lower-case letters and digits, without what tells spellings apart."""
    return re.sub(r'[^a-z0-9]', '', str(name).lower())


def to_download(place: str, folder: str) -> str:
    """Says how the text of a data set OWNER/NAME is read, from the hub or from a folder."""
    source = shlex.quote(f'--config.data.source=text:{folder}/**/*.parquet')
    return (
        f'--config.data.source=hub:{place} is the parquet files of that data set, fetched with the '
        f'extra hub; files of your own are {source} (or .txt, .jsonl)'
    )


def suffixes(flag: str) -> list[str]:
    """Returns ['a.b.c', 'b.c', 'c'] for --a.b.c, in lower case and with underscores."""
    parts = flag.lstrip('-').lower().replace('-', '_').split('.')
    return ['.'.join(parts[at:]) for at in range(len(parts))]


def spelt(name: str, text: str) -> str:
    """Returns the value of a name as it is written here, unless it is written so already."""
    is_here = text.partition(':')[0] in ('bpe', 'byte', 'hf', 'hub', 'text', 'tfds')
    return text if is_here or not text else SPELT.get(name, '{}').format(text.strip('[]"'))


def absent(name: str) -> str:
    """Says what there is instead of a name that stands for nothing here; '' for another name."""
    for corpus, place in CORPORA.items():
        if word(str(name).rpartition('/')[2]).startswith(corpus):
            return to_download(name if '/' in name else place, corpus)
    return ABSENT.get(word(name), '')


class Translator:
    """Turns flags of other programs into one answer.

    fields: {path: (its types, the names that it may have)} of the config; empty for a program
    without one. flags: the flags of the program at hand.
    """

    def __init__(self, fields: Mapping[str, tuple], flags: Collection[str]):
        self._fields, self._flags = fields, flags
        self._foreign: list[str] = []
        self._here: dict[str, str] = {}  # {flag: its value}
        self._words: list[str] = []
        self._shares: list[tuple[str, str, str]] = []
        self._is_of_a_step = False

    def is_foreign(self, path: str, text: str) -> bool:
        """Whether --config.PATH=TEXT is out of another program, which has a config too."""
        if path in self._fields:
            _, names = self._fields[path]
            return bool(names and text) and text not in names and word(text) in VALUES.get(path, {})
        section = path.split('.')[0]
        if section in ('', 'sweep', 'tune'):
            return False
        is_named = any(n in SYNONYMS or n in SHARES for n in suffixes(f'config.{path}'))
        return is_named or not any(field.startswith(f'{section}.') for field in self._fields)

    def add(self, given: str, text: str) -> None:
        """Takes a flag that there is not, such as --learning_rate, and its value, '' for none."""
        names = suffixes(given if given.startswith('-') else f'maxtext.{given}')
        last = names[-1]
        own = next((flag for n in names if (flag := OWN.get(n, n)) in self._flags), '')
        known = next((n for n in names if n in SYNONYMS), '')
        share = next((n for n in names if n in SHARES), '')
        missing = next(filter(absent, names), '')
        group = next(filter(absent, names[0].split('.')[:-1]), '')
        paths = [n for n in names if n in self._fields]
        paths = paths or [path for path in SYNONYMS.get(known, ()) if path in self._fields]
        paths = paths or [path for path in self._fields if path.split('.')[1] == last]
        is_missing_value = absent(spelt(known, text)) if paths and text else ''
        if known in OF_HUB and re.fullmatch(r'[\w-]+/[\w.-]+', text):
            is_missing_value = is_missing_value or to_download(text, text.partition('/')[2])
        self._is_of_a_step |= any(n in OF_A_STEP for n in names)
        if own:
            self._add_own(given, own, last, text)
        elif self._fields and {*names} & {*OF_MODELS}:
            self._add(given, 'config', f'configs/{preset(text)}.py')
            self.say(NOTES.get(last, ''))
        elif share and self._fields:
            self._shares.append((given, share, text))
        elif len(missing) > len(known):
            self.say(f'{given}: {absent(missing)}.')
        elif group and not known:
            self.say(f'{given}: {absent(group)}.')
        elif is_missing_value:
            self.say(f'{given}={text}: {is_missing_value}.')
        elif known and paths:
            self._add_field(given, paths[0], known, text)
        elif len(paths) == 1:
            self._add_field(given, paths[0], last, text)
        elif paths:
            maybe = ' or '.join(f'--config.{path}={text or "..."}' for path in paths)
            self.say(f'{given} is {maybe}.')
        else:
            self.say(f'{given} is no flag here.{self._nearest(last, text)}')

    def _nearest(self, name: str, text: str) -> str:
        """Suggests a flag for a misspelt name."""
        fields = {path.split('.')[1]: path for path in reversed(self._fields)}
        fields |= {n: paths[0] for n, paths in SYNONYMS.items() if paths[0] in self._fields}
        near = ''.join(closest(name, [*self._flags, *fields])) if len(name) > 1 else ''
        flag = f'config.{fields[near]}' if near in fields else near
        return f' Did you mean --{flag}{"=" if text else ""}{text}?' if near else ''

    def say(self, text: str) -> None:
        """Adds a sentence to the answer."""
        if text and text not in self._words:
            self._words.append(text)

    def _add(self, given: str, flag: str, text: str) -> None:
        self._foreign.append(given)
        self._here[flag] = text

    def _add_own(self, given: str, flag: str, name: str, text: str) -> None:
        """Takes a flag; --workdir joins the folder of all runs and the name of one."""
        before = self._here.get(flag, '')
        if name in ('run_name', 'id'):
            text = f'{before or "runs"}/{text}'
        elif flag == 'workdir':
            text = text.rstrip('/') + before.removeprefix('runs')
        self._add(given, flag, text)

    def _add_field(self, given: str, path: str, name: str, text: str) -> None:
        here = self._carried(path, name, text)
        others = ALSO.get(name) or ALSO.get(word(text), {})
        others = {} if here == 'none' else others  # what is turned off needs nothing
        also = {f'config.{other}': value for other, value in others.items()}
        if given == f'--config.{path}':
            self.say(f'{given}={text} is no value here.')
            self._here[f'config.{path}'] = here
        else:
            self._add(given, f'config.{path}', here or '...')
        if path.startswith('mesh.') and here == '-1':  # one axis alone takes what the others leave
            also = {'config.mesh.data': '1', f'config.{path}': '-1'}
        self._here |= also
        notes = (NOTES.get(n, '') for n in (*suffixes(given), name))
        self.say(next(filter(None, notes), ''))

    def _carried(self, path: str, name: str, text: str) -> str:
        """Returns the value as the field spells it; '' where it is none that the field takes."""
        types, names = self._fields[path]
        tables = [VALUES[n] for n in (name, path) if word(text) in VALUES.get(n, {})]
        text = tables[0][word(text)] if tables else spelt(name, text)
        if names and text and text not in names:
            usual = USUAL_NAMES.get(word(text))
            if usual in names:
                return usual
            near = ''.join(closest(text, names))
            self.say(f'{path} has no {text}; {near} is nearest.' if near else '')
            return near
        if bool in types:
            return text or 'True'
        if int in types or float in types:
            try:
                number = float(text)
            except ValueError:
                return ''
            return str(int(number)) if int in types and number.is_integer() else text
        return text

    def _settle_shares(self) -> None:
        """Turns shares into values where what they are shares of is given too, else into words."""
        for given, name, text in self._shares:
            path, of = SHARES[name]
            try:
                share, whole = float(text), float(self._here.get(f'config.{of}', 'nan'))
            except ValueError:
                share = whole = math.nan
            value = share / whole if path == 'optim.final_lr_fraction' and whole else share * whole
            if path == 'optim.warmup_steps' and (share > 1 or not share):
                value = share  # steps
            if not math.isfinite(value):
                self.say(f'{given}: {absent(name)}.')
            elif path == 'optim.warmup_steps':
                self._add(given, f'config.{path}', str(round(value)))
            else:
                self._add(given, f'config.{path}', f'{value:.6g}')
        self._shares.clear()

    def answer(self) -> str:
        """Returns one line for all flags that were added; '' for none."""
        self._settle_shares()
        sizes = [self._here.get(f'config.{path}', '') for path in BATCHES]
        if all(map(str.isdecimal, sizes)) and not self._is_of_a_step:
            self._here[f'config.{BATCHES[0]}'] = str(int(sizes[0]) * int(sizes[1]))
        flags = [f'--{flag}' + (f'={text}' if text else '') for flag, text in self._here.items()]
        said = 'is no flag' if len(self._foreign) == 1 else 'are no flags'
        first = f'{", ".join(self._foreign)} {said} here.' if self._foreign else ''
        last = f'Write {shlex.join(flags)}' if flags else ''
        return ' '.join(filter(None, [first, *self._words, last]))


BATCHES = ('data.batch_size', 'train.microbatches')


def positional(argument: str) -> tuple[str, str]:
    """Returns (name, value) of NAME=VALUE, which MaxText takes without --, else ('', '')."""
    match = re.fullmatch(r'([A-Za-z]\w*)=(.*)', argument, re.DOTALL)
    return (match[1], match[2]) if match else ('', '')


def file_advice(argument: str) -> str:
    """Says how a config is given, for a path that stands alone; '' for what is no such path."""
    if Path(argument).suffix not in ('.py', '.toml', '.yml', '.yaml', '.json'):
        return ''
    file = argument if argument.endswith('.py') and Path(argument).is_file() else ''
    return (
        f'{argument}: a config is given as --config={file or "configs/default.py"}, a Python file.'
    )
