"""Names that nanoGPT, torchtitan, Hugging Face and MaxText have for what is here, and for what is
not. They are refused; the answer has the flags that work, with the values given.
"""

import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path

from modules.choices import USUAL_NAMES, closest

# {name: fields here}; where one flag is to be written it is of the first.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    name: tuple(fields.split())
    for fields, names in {
        'attention.rope_base': 'rope_max_timescale rope_theta',
        'attention.rope_fraction': 'partial_rotary_factor rotary_pct',
        'attention.window': 'sliding_window sliding_window_size',
        'data.batch_size': 'batch device_batch_size eval_batch_size global_batch_size '
        'local_batch_size micro_batch_size per_device_batch_size per_device_train_batch_size '
        'train_batch_size',
        'data.epochs': 'num_epochs num_train_epochs',
        'data.seed': 'data_seed data_shuffle_seed',
        'data.seq_len': 'block_size context_length max_length max_position_embeddings '
        'max_seq_len max_seq_length max_target_length model_max_length sequence_length',
        'data.source': 'dataset dataset_name dataset_path hf_path hf_train_files train_file',
        'data.mixture': 'sources',
        'data.tokenizer': 'hf_assets_path tokenizer_name tokenizer_path vocab_size',
        'kernels.attention': 'attn_implementation',
        'loss.label_smoothing': 'label_smoothing_factor',
        'mesh.context': 'context_parallel_degree ici_context_parallelism ici_sequence_parallelism',
        'mesh.data': 'data_parallel_replicate_degree dcn_data_parallelism ici_data_parallelism',
        'mesh.expert': 'expert_parallel_degree ici_expert_parallelism',
        'mesh.fsdp': 'data_parallel_shard_degree dcn_fsdp_parallelism ici_fsdp_parallelism',
        'mesh.tensor': 'ici_tensor_parallelism tensor_parallel_degree tp',
        'mlp.experts_per_token': 'num_experts_per_tok',
        'mlp.n_experts': 'num_experts',
        'model.activation': 'hidden_act mlp_activations',
        'model.d_ff': 'base_mlp_dim intermediate_size',
        'model.d_model': 'base_emb_dim dim hidden_size n_embd width',
        'model.dtype': 'bf16 fp16 mixed_precision_param torch_dtype',
        'model.n_heads': 'base_num_query_heads n_head num_attention_heads num_heads',
        'model.n_kv_heads': 'base_num_kv_heads num_key_value_heads',
        'model.n_layers': 'base_num_decoder_layers depth layers n_layer num_hidden_layers '
        'num_layers',
        'model.qk_norm': 'qk_layernorm',
        'model.remat': 'activation_checkpoint.mode gradient_checkpointing remat_policy',
        'model.tie_embeddings': 'logits_via_embedding tie_word_embeddings weight_tying',
        'norm.eps optim.eps': 'epsilon',
        'norm.eps': 'layer_norm_epsilon normalization_layer_epsilon rms_norm_eps',
        'optim.b1': 'adam_b1 adam_beta1 beta1',
        'optim.b2': 'adam_b2 adam_beta2 beta2',
        'optim.clip_norm': 'grad_clip gradient_clip_val gradient_clipping_threshold '
        'max_grad_norm max_norm',
        'optim.eps': 'adam_eps adam_epsilon optimizer.eps',
        'optim.final_lr_fraction': 'cosine_learning_rate_final_fraction min_lr_factor min_lr_ratio',
        'optim.lr': 'learning_rate',
        'optim.name': 'opt_type optim optimizer optimizer.name optimizer_type',
        'optim.schedule': 'decay_lr decay_type lr_schedule lr_scheduler lr_scheduler_type',
        'optim.warmup_steps norm.warmup': 'warmup',
        'optim.warmup_steps': 'num_warmup_steps warmup_iters',
        'optim.weight_decay': 'adam_weight_decay decay wd',
        'scaling.init_scale': 'init_std initializer_range',
        'train.checkpoint_every': 'checkpoint.interval checkpoint_period save_every save_interval '
        'save_steps',
        'train.eval_batches': 'eval_iters eval_steps_per_eval validation.steps',
        'train.eval_every': 'eval_interval eval_steps validation.freq',
        'train.init_from': 'initial_load_path load_parameters_path model_name_or_path pretrained',
        'train.keep_last': 'keep_latest_k save_total_limit',
        'train.log_every': 'log_freq log_interval log_period logging_steps',
        'train.microbatches': 'accumulation_steps grad_accum_steps gradient_accumulation '
        'gradient_accumulation_steps',
        'train.seed': 'init_weights_seed seed',
        'train.steps': 'max_iters max_steps max_train_steps num_iterations num_steps '
        'num_training_steps total_steps train_steps',
    }.items()
    for name in names.split()
}
# {name: a flag of a program here that is no field of the config}
OWN: Mapping[str, str] = {
    'base_output_directory': 'workdir',
    'checkpoint.folder': 'workdir',
    'checkpoint_dir': 'workdir',
    'dump_folder': 'workdir',
    'max_new_tokens': 'tokens',
    'out_dir': 'workdir',
    'output_dir': 'workdir',
    'run_name': 'workdir',
    'save_dir': 'workdir',
    'work_dir': 'workdir',
}
# {name or field: {value there, in letters and digits: value here}}; '' is a flag without a value.
VALUES: Mapping[str, Mapping[str, str]] = {
    'bf16': {'': 'bfloat16', 'true': 'bfloat16', 'false': 'float32'},
    'fp16': {'': 'bfloat16', 'true': 'bfloat16', 'false': 'float32'},
    'decay_lr': {'': 'warmup_cosine', 'true': 'warmup_cosine', 'false': 'constant'},
    'gradient_checkpointing': {'': 'full', 'true': 'full', 'false': 'none'},
    'mlp_activations': {'silulinear': 'swiglu', 'gelulinear': 'geglu'},
    'mesh.fsdp': {'fullshard': '-1', 'true': '-1'},
    'model.remat': {'selective': 'dots', 'minimal': 'dots', 'off': 'none'},
    'optim.schedule': {'constantwithwarmup': 'constant'},
}
# {name: what its value is here}
SPELT: Mapping[str, str] = {
    'dataset_path': 'text:{}',
    'hf_assets_path': 'hf:{}',
    'hf_train_files': 'text:{}',
    'tokenizer_name': 'hf:{}',
    'tokenizer_path': 'hf:{}',
    'train_file': 'text:{}',
    'vocab_size': 'bpe:{}',
}
A_STEP = 'data.batch_size counts the sequences of a step over all devices.'
NOTES: Mapping[str, str] = {
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
    'decoder_block',
    'flavor',
    'model',
    'model.name',
    'model_name',
    'model_size',
    'model_type',
)
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
        'there is no dropout; optim.weight_decay and loss.label_smoothing are what regularises': (
            'dropout dropoutrate attndropout attentiondropout residdropout hiddendropout '
            'embddropout attentionprobsdropoutprob enabledropout'
        ),
        'there is no LoRA; --config.train.trainable=norms trains few parameters, and '
        '--config.optim.name=galore keeps little of the optimizer': (
            'lora uselora loraalpha loradropout lorar lorarank peft qlora usepeft'
        ),
        'every step is compiled; there is nothing to set': (
            'compile compileenable torchcompile jit usecompile'
        ),
        'nothing is sent anywhere; WORKDIR/metrics.jsonl has every row, and python -m eval.report '
        '--workdir=WORKDIR makes a page of it': (
            'wandb wandblog wandbproject wandbrunname wandbentity usewandb enablewandb reportto '
            'tensorboard enabletensorboard savetbfolder tensorboarddir loggingdir'
        ),
        '--config.kernels.attention=auto, the default, runs anywhere in bounded memory; cudnn '
        '(NVIDIA, bfloat16) and splash (TPU) are fused': (
            'flash flashattn flashattention flashattention2 flashattention3 sdpa useflashattn '
            'autoselected dotproduct xformers flexattention flexattn useflexattn'
        ),
        'weights of other programs cannot be read; configs/llama_124m.py is a model of that size, '
        'and train.init_from starts from a workdir of this program': (
            'gpt2 gpt2medium gpt2large gpt2xl'
        ),
        'the same command with the same --workdir goes on where it stopped': (
            'resume autoresume resumefromcheckpoint loadstep checkpointloadstep enablecheckpoint '
            'enablecheckpointing checkpointenable checkpointenablecheckpoint asynccheckpointing '
            'alwayssavecheckpoint overwriteoutputdir'
        ),
        'a run starts from random weights unless --config.train.init_from is given': 'scratch',
        'JAX takes the devices that are there; JAX_PLATFORMS=cpu in the environment names others': (
            'device backend usecpu nocuda hardware ddp ddpbackend accelerator'
        ),
        'steps are what everything is counted in: --config.train.eval_every, '
        '--config.train.checkpoint_every and --config.train.log_every': (
            'evaluationstrategy evalstrategy savestrategy loggingstrategy validationenable'
        ),
        'a warm-up is given in steps: --config.optim.warmup_steps': (
            'warmupratio warmupstepsfraction'
        ),
        'a schedule ends at --config.train.steps': (
            'lrdecayiters lrdecaysteps learningrateschedulesteps decayratio'
        ),
        'a schedule ends at a share of optim.lr: --config.optim.final_lr_fraction': 'minlr',
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
        'a head has model.d_model / model.n_heads features': 'headdim',
        'batches are made ahead of the step: --config.data.prefetch': (
            'dataloadernumworkers numworkers dataloaderpinmemory'
        ),
        'a config is a Python file with get_config(): --config=configs/default.py': (
            'configfile jobconfigfile'
        ),
        'train.py trains and evaluates; python -m eval --checkpoint=WORKDIR evaluates alone': (
            'dotrain doeval evalonly dopredict'
        ),
        'text is read from files, and a part of it held out: --config.data.source=text:PATH and '
        '--config.data.validation_fraction': 'datasettype validationfile valfile testfile',
        'evaluation has batches of --config.data.batch_size too': 'perdeviceevalbatchsize',
        'the best checkpoints stay as well: --config.train.keep_best': 'loadbestmodelatend',
        'python -m eval.generate --checkpoint=WORKDIR --tokens=N samples from a run': (
            'maxnewtokens numsamples'
        ),
        '--config.train.diagnose_every shows what each layer does, and JAX has a profiler': (
            'enableprofiling profile profiler profilerstart'
        ),
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


def absent(name: str) -> str:
    """Says what there is instead of a name that stands for nothing here; '' for another name."""
    for corpus, place in CORPORA.items():
        if word(str(name).rpartition('/')[2]).startswith(corpus):
            place = name if '/' in name else place
            source = shlex.quote(f'--config.data.source=text:{corpus}/**/*.parquet')
            return (
                f'no text is downloaded here; hf download {place} --repo-type=dataset '
                f'--local-dir={corpus}, or any files, then {source} (or .txt, .jsonl)'
            )
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

    def add(self, given: str, text: str) -> None:
        """Takes a flag that there is not, such as --learning_rate, and its value, '' for none."""
        name = given.lstrip('-').lower().replace('-', '_')
        last = name.rpartition('.')[2]
        own = next((flag for n in (name, last) if (flag := OWN.get(n, n)) in self._flags), '')
        known = next((n for n in (name, last) if n in SYNONYMS), '')
        paths = [path for path in self._fields if path in SYNONYMS.get(known, ())]
        paths = paths or [path for path in self._fields if path.split('.')[1] == last]
        is_missing = next(filter(None, map(absent, (name, last))), '')
        is_missing_value = absent(text) if paths and text else ''
        if own:
            self._add_own(given, own, last, text)
        elif self._fields and {last, name} & {*OF_MODELS}:
            self._add(given, 'config', f'configs/{preset(text)}.py')
        elif is_missing and not known:
            self.say(f'{given}: {is_missing}.')
        elif is_missing_value:
            self.say(f'{given}={text}: {is_missing_value}.')
        elif known and paths:
            self._add_field(given, SYNONYMS[known][0], known, text)
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
        near = ''.join(closest(name, [*self._flags, *fields]))
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
        if name == 'run_name':
            text = f'{before or "runs"}/{text}'
        elif flag == 'workdir':
            text = text.rstrip('/') + before.removeprefix('runs')
        self._add(given, flag, text)

    def _add_field(self, given: str, path: str, name: str, text: str) -> None:
        text = self._carried(path, name, text)
        self._add(given, f'config.{path}', text or '...')
        if path.startswith('mesh.') and text == '-1':  # one axis alone takes what the others leave
            self._here |= {'config.mesh.data': '1', f'config.{path}': '-1'}
        self.say(NOTES.get(name, ''))

    def _carried(self, path: str, name: str, text: str) -> str:
        """Returns the value as the field spells it; '' where it is none that the field takes."""
        types, names = self._fields[path]
        for table in (VALUES.get(name, {}), VALUES.get(path, {})):
            text = table.get(word(text), text)
        text = SPELT.get(name, '{}').format(text) if text else text
        if names and text and text not in names:
            usual = USUAL_NAMES.get(word(text))
            return usual if usual in names else ''.join(closest(text, names))
        if bool in types:
            return text or 'True'
        if int in types or float in types:
            try:
                number = float(text)
            except ValueError:
                return ''
            return str(int(number)) if int in types and number.is_integer() else text
        return text

    def answer(self) -> str:
        """Returns one line for all flags that were added; '' for none."""
        sizes = [self._here.get(f'config.{path}', '') for path in BATCHES]
        if all(map(str.isdecimal, sizes)):  # elsewhere a batch is what is here a microbatch
            self._here[f'config.{BATCHES[0]}'] = str(int(sizes[0]) * int(sizes[1]))
        flags = [f'--{flag}' + (f'={text}' if text else '') for flag, text in self._here.items()]
        said = 'is no flag' if len(self._foreign) == 1 else 'are no flags'
        first = f'{", ".join(self._foreign)} {said} here.' if flags else ''
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
