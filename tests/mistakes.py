"""Commands in the style of other programs, and the commands to use here instead."""

# {program: {what is given: the flags that the answer ends with}}
ANSWERED = {
    'nanoGPT': {
        '--learning_rate=6e-4': '--config.optim.lr=6e-4',
        '--learning-rate 3e-4': '--config.optim.lr=3e-4',
        '--lr 1e-3': '--config.optim.lr=1e-3',
        '--batch_size=12': '--config.data.batch_size=12',
        '--batch-size 32': '--config.data.batch_size=32',
        '--batch_size=12 --gradient_accumulation_steps=4': '--config.data.batch_size=48 '
        '--config.train.microbatches=4',
        '--gradient_accumulation_steps=8': '--config.train.microbatches=8',
        '--block_size=256': '--config.data.seq_len=256',
        '--n_layer=6 --n_head=6 --n_embd=384': '--config.model.n_layers=6 --config.model.n_heads=6 '
        '--config.model.d_model=384',
        '--max_iters=5000': '--config.train.steps=5000',
        '--beta2=0.99': '--config.optim.b2=0.99',
        '--warmup=100': '--config.optim.warmup_steps=100',
        '--warmup_iters=100': '--config.optim.warmup_steps=100',
        '--grad_clip=1.0': '--config.optim.clip_norm=1.0',
        '--grad_clip=0.0': '--config.optim.clip_norm=inf',
        '--learning_rate=6e-4 --min_lr=6e-5': '--config.optim.lr=6e-4 '
        '--config.optim.final_lr_fraction=0.1',
        '--eval_interval=250 --eval_iters=200': '--config.train.eval_every=250 '
        '--config.train.eval_batches=200',
        '--log_interval=10': '--config.train.log_every=10',
        '--dropout=0.2': '--config.model.dropout=0.2',
        '--out_dir=out-shakespeare-char': '--workdir=out-shakespeare-char',
        '--dtype=bfloat16': '--config.model.dtype=bfloat16',
        '--decay_lr=True': '--config.optim.schedule=warmup_cosine',
        '--seed=1337': '--config.train.seed=1337',
        '--vocab_size=4096': '--config.data.tokenizer=bpe:4096',
    },
    'torchtitan': {
        '--training.steps 1000': '--config.train.steps=1000',
        '--model.flavor=8B': '--config=configs/llama_8b.py',
        '--optimizer.lr=3e-4': '--config.optim.lr=3e-4',
        '--optimizer.name=AdamW': '--config.optim.name=adamw',
        '--optimizer.eps=1e-8': '--config.optim.eps=1e-8',
        '--lr_scheduler.warmup_steps=200': '--config.optim.warmup_steps=200',
        '--lr_scheduler.decay_type=cosine': '--config.optim.schedule=warmup_cosine',
        '--lr_scheduler.min_lr_factor=0.1': '--config.optim.final_lr_fraction=0.1',
        '--training.local_batch_size=8': '--config.data.batch_size=8',
        '--training.seq_len=2048': '--config.data.seq_len=2048',
        '--training.max_norm=1.0': '--config.optim.clip_norm=1.0',
        '--training.dataset_path=./data': '--config.data.source=text:./data',
        '--training.mixed_precision_param=bfloat16': '--config.model.dtype=bfloat16',
        '--parallelism.data_parallel_shard_degree=4': '--config.mesh.fsdp=4',
        '--parallelism.data_parallel_shard_degree=-1': '--config.mesh.fsdp=-1 --config.mesh.data=1',
        '--parallelism.tensor_parallel_degree=2': '--config.mesh.tensor=2',
        '--parallelism.context_parallel_degree=2': '--config.mesh.context=2',
        '--activation_checkpoint.mode=full': '--config.model.remat=full',
        '--activation_checkpoint.mode=selective': '--config.model.remat=dots',
        '--checkpoint.interval=500': '--config.train.checkpoint_every=500',
        '--checkpoint.folder=saved': '--workdir=saved',
        '--metrics.log_freq=10': '--config.train.log_every=10',
        '--job.dump_folder=./outputs': '--workdir=./outputs',
        '--validation.freq=100': '--config.train.eval_every=100',
    },
    'Hugging Face': {
        '--output_dir=out': '--workdir=out',
        '--num_train_epochs=3': '--config.data.epochs=3',
        '--lr_scheduler_type=cosine': '--config.optim.schedule=warmup_cosine',
        '--lr_scheduler_type=constant_with_warmup': '--config.optim.schedule=constant',
        '--weight_decay=0.1': '--config.optim.weight_decay=0.1',
        '--fp16': '--config.model.dtype=bfloat16',
        '--bf16 --max_steps=100': '--config.model.dtype=bfloat16 --config.train.steps=100',
        '--bf16=False': '--config.model.dtype=float32',
        '--save_steps=500 --save_total_limit=2': '--config.train.checkpoint_every=500 '
        '--config.train.keep_last=2',
        '--logging_steps=10': '--config.train.log_every=10',
        '--eval_steps=500': '--config.train.eval_every=500',
        '--max_grad_norm=1.0': '--config.optim.clip_norm=1.0',
        '--adam_beta1=0.9 --adam_beta2=0.95 --adam_epsilon=1e-8': '--config.optim.b1=0.9 '
        '--config.optim.b2=0.95 --config.optim.eps=1e-8',
        '--model_name_or_path=out/run': '--config.train.init_from=out/run',
        '--per_device_train_batch_size=8': '--config.data.batch_size=8',
        '--warmup_steps=500': '--config.optim.warmup_steps=500',
        '--warmup_ratio=0.03 --max_steps=1000': '--config.train.steps=1000 '
        '--config.optim.warmup_steps=30',
        '--hidden_act=silu': '--config.model.activation=swiglu',
        '--train_batch_size=64 --gradient_accumulation_steps=4': '--config.data.batch_size=64 '
        '--config.train.microbatches=4',
        '--gradient_checkpointing': '--config.model.remat=full',
        '--optim=adamw_torch': '--config.optim.name=adamw',
        '--use_lora': '--config.model.reparam=lora --config.train.trainable=lora',
        '--use_lora=false': '--config.model.reparam=none',
        '--lora_r=16 --lora_alpha=32': '--config.reparam.rank=16 --config.model.reparam=lora '
        '--config.train.trainable=lora --config.reparam.alpha=32',
        '--label_smoothing_factor=0.1': '--config.loss.label_smoothing=0.1',
        '--train_file=a.txt': '--config.data.source=text:a.txt',
        '--validation_file=b.txt': '--config.data.validation_source=text:b.txt',
        '--packing=true': '--config.data.packing=best_fit',
        '--torch_dtype=bfloat16': '--config.model.dtype=bfloat16',
        '--fsdp=full_shard': '--config.mesh.fsdp=-1 --config.mesh.data=1',
        '--hidden_size=768 --num_hidden_layers=12 --num_attention_heads=12': (
            '--config.model.d_model=768 --config.model.n_layers=12 --config.model.n_heads=12'
        ),
    },
    'MaxText': {
        'per_device_batch_size=4': '--config.data.batch_size=4',
        'base_output_directory=gs://bucket/out run_name=first': '--workdir=gs://bucket/out/first',
        'run_name=first': '--workdir=runs/first',
        'model_name=llama3-8b': '--config=configs/llama_8b.py',
        'model_name=gpt2': '--config=configs/llama_124m.py',
        'decoder_block=llama2': '--config=configs/llama_124m.py',
        'base_emb_dim=512 base_mlp_dim=2048': '--config.model.d_model=512 --config.model.d_ff=2048',
        'base_num_query_heads=8 base_num_kv_heads=2': '--config.model.n_heads=8 '
        '--config.model.n_kv_heads=2',
        'base_num_decoder_layers=8': '--config.model.n_layers=8',
        'ici_fsdp_parallelism=-1': '--config.mesh.fsdp=-1 --config.mesh.data=1',
        'ici_tensor_parallelism=2': '--config.mesh.tensor=2',
        'dcn_data_parallelism=2': '--config.mesh.data=2',
        'remat_policy=minimal': '--config.model.remat=dots',
        'steps=100 learning_rate=3e-5': '--config.train.steps=100 --config.optim.lr=3e-5',
        'max_target_length=2048': '--config.data.seq_len=2048',
        'eval_interval=100 eval_steps=20': '--config.train.eval_every=100 '
        '--config.train.eval_batches=20',
        'checkpoint_period=100': '--config.train.checkpoint_every=100',
        'opt_type=adamw': '--config.optim.name=adamw',
        'adam_weight_decay=0.1': '--config.optim.weight_decay=0.1',
        'gradient_clipping_threshold=1.0': '--config.optim.clip_norm=1.0',
        'tokenizer_path=assets/tokenizer.json': '--config.data.tokenizer=hf:assets/tokenizer.json',
        'load_parameters_path=gs://bucket/run': '--config.train.init_from=gs://bucket/run',
        'scan_layers=true': '--config.model.scan_layers=true',
        'logits_via_embedding=true': '--config.model.tie_embeddings=true',
        'steps=100 warmup_steps_fraction=0.1': '--config.train.steps=100 '
        '--config.optim.warmup_steps=10',
    },
    'Levanter': {
        '--config_path=config/llama2_7b.yaml': '--config=configs/llama_8b.py',
        '--config_path config/gpt2_small.yaml --trainer.num_train_steps 1000': (
            '--config=configs/llama_124m.py --config.train.steps=1000'
        ),
        '--model.attn_pdrop=0.1': '--config.model.attention_dropout=0.1',
        '--trainer.train_batch_size=256': '--config.data.batch_size=256',
        '--trainer.num_train_steps=20000': '--config.train.steps=20000',
        '--trainer.steps_per_eval=500 --trainer.max_eval_batches=10': (
            '--config.train.eval_every=500 --config.train.eval_batches=10'
        ),
        '--trainer.mp=p=f32,c=bfloat16': '--config.model.dtype=bfloat16',
        '--trainer.seed=1': '--config.train.seed=1',
        '--data_seed=2': '--config.data.seed=2',
        '--trainer.fsdp_axis=embed': '--config.mesh.fsdp=-1 --config.mesh.data=1',
        '--trainer.model_axis_size=2': '--config.mesh.tensor=2',
        '--trainer.replica_ici_axis_size=2': '--config.mesh.data=2 --config.mesh.fsdp=-1',
        '--trainer.checkpointer.base_path=gs://bucket/out --trainer.id=first': (
            '--workdir=gs://bucket/out/first'
        ),
        '--trainer.load_checkpoint_path=out/run': '--config.train.init_from=out/run',
        '--trainer.model_averaging.type=ema': '--config.optim.average=ema',
        '--optimizer.learning_rate=6e-4': '--config.optim.lr=6e-4',
        '--optimizer.weight_decay=0.1': '--config.optim.weight_decay=0.1',
        '--optimizer.warmup=2000': '--config.optim.warmup_steps=2000',
        '--optimizer.warmup=0.01 --trainer.num_train_steps=20000': '--config.train.steps=20000 '
        '--config.optim.warmup_steps=200',
        '--optimizer.lr_schedule=cosine': '--config.optim.schedule=warmup_cosine',
        '--optimizer.lr_schedule=inv_sqrt': '--config.optim.schedule=inverse_sqrt',
        '--optimizer.cycles=2': '--config.optim.cycles=2 --config.optim.schedule=cyclic',
        '--optimizer.adamc_weight_decay=true': '--config.optim.decay_rule=adamc',
        '--optimizer.min_lr_ratio=0.1': '--config.optim.final_lr_fraction=0.1',
        '--optimizer.beta1=0.9 --optimizer.beta2=0.95': '--config.optim.b1=0.9 '
        '--config.optim.b2=0.95',
        '--optimizer.epsilon=1e-8': '--config.optim.eps=1e-8',
        '--optimizer.max_grad_norm=1.0': '--config.optim.clip_norm=1.0',
        '--optimizer.max_grad_norm=null': '--config.optim.clip_norm=inf',
        '--optimizer.type=adam': '--config.optim.name=adamw',
        '--model.type=llama': '--config=configs/llama_124m.py',
        '--model.hidden_dim=768 --model.intermediate_dim=2048': '--config.model.d_model=768 '
        '--config.model.d_ff=2048',
        '--model.num_layers=12': '--config.model.n_layers=12',
        '--model.num_heads=8 --model.num_kv_heads=2': '--config.model.n_heads=8 '
        '--config.model.n_kv_heads=2',
        '--model.seq_len=1024': '--config.data.seq_len=1024',
        '--model.max_seq_len=1024': '--config.data.seq_len=1024',
        '--model.gradient_checkpointing=true': '--config.model.remat=full',
        '--model.activation_function=silu': '--config.model.activation=swiglu',
        '--model.hybrid_norm=true': '--config.model.placement=peri',
        '--model.rope.theta=500000': '--config.attention.rope_base=500000',
        '--model.use_bias=false': '--config.model.bias=false',
        '--data.tokenizer=tokenizers/llama': '--config.data.tokenizer=hf:tokenizers/llama',
        '--data.train_urls=[mine/a.jsonl.gz]': '--config.data.source=text:mine/a.jsonl.gz',
        '--data.validation_urls=[b.jsonl]': '--config.data.validation_source=text:b.jsonl',
        '--data.format.text_key=body': '--config.data.text_field=body',
        '--data.cache_dir=cache': '--config.data.cache_dir=cache',
        '--z_loss_weight=1e-4': '--config.loss.z_loss=1e-4',
    },
    'NanoDO': {
        '--config.seed=42': '--config.train.seed=42',
        '--config.workdir=/tmp/nanodo': '--workdir=/tmp/nanodo',
        '--config.batch_size=256': '--config.data.batch_size=256',
        '--config.batch_size=256 --config.grad_accumulation_steps=4': (
            '--config.data.batch_size=256 --config.train.microbatches=4'
        ),
        '--config.train_epochs=1': '--config.data.epochs=1',
        '--config.ds_name=lm1b:1.1.0': '--config.data.source=tfds:lm1b:1.1.0',
        '--config.model.D=512 --config.model.F=2048': '--config.model.d_model=512 '
        '--config.model.d_ff=2048',
        '--config.model.H=8 --config.model.N=6': '--config.model.n_heads=8 '
        '--config.model.n_layers=6',
        '--config.model.L=512': '--config.data.seq_len=512',
        '--config.model.remat=True': '--config.model.remat=full',
        '--config.model.fsdp_enabled=True': '--config.mesh.fsdp=-1 --config.mesh.data=1',
        '--config.model.fsdp_enabled=False': '--config.mesh.fsdp=1',
        '--config.opt.num_train_steps=1000 --config.opt.warmup_steps=100': (
            '--config.train.steps=1000 --config.optim.warmup_steps=100'
        ),
        '--config.opt.peak_learning_rate=0.0016': '--config.optim.lr=0.0016',
        '--config.opt.peak_learning_rate=0.002 --config.opt.final_learning_rate=0.0002': (
            '--config.optim.lr=0.002 --config.optim.final_lr_fraction=0.1'
        ),
        '--config.opt.decay_type=cosine': '--config.optim.schedule=warmup_cosine',
        '--config.opt.decay_type=rsqrt': '--config.optim.schedule=inverse_sqrt '
        '--config.optim.inverse_sqrt_steps=1',
        '--config.opt.decay_type=constant_without_warmup': '--config.optim.schedule=constant '
        '--config.optim.warmup_steps=0',
        '--config.opt.eps=1e-9': '--config.optim.eps=1e-9',
        '--config.opt.weight_decay=0.1': '--config.optim.weight_decay=0.1',
        '--config.opt.independent_weight_decay=True': '--config.optim.decay_rule=independent',
        '--config.opt.clip_by_global_norm=1.0': '--config.optim.clip_norm=1.0',
        '--config.opt.clip_by_global_norm=None': '--config.optim.clip_norm=inf',
        '--config.opt.optimizer=lion': '--config.optim.name=lion',
        '--config.opt.b2=0.98': '--config.optim.b2=0.98',
        '--config.checkpoint_every_steps=2000': '--config.train.checkpoint_every=2000',
        '--config.checkpoint_restore_dir=out/run': '--config.train.init_from=out/run',
        '--config.max_to_keep=100': '--config.train.keep_last=100',
        '--config.eval_every_steps=100 --config.eval_steps=50': '--config.train.eval_every=100 '
        '--config.train.eval_batches=50',
        '--config.write_train_metrics_every_steps=10': '--config.train.log_every=10',
    },
    'nanochat': {
        '--depth=24 --device-batch-size=16 --run=d24': '--config.model.n_layers=24 '
        '--config.data.batch_size=16 --workdir=runs/d24',
        '--total-batch-size=524288 --max-seq-len=2048': '--config.data.seq_len=2048 '
        '--config.data.batch_size=256',
        '--num-iterations=5000 --save-every=-1': '--config.train.steps=5000 '
        '--config.train.checkpoint_every=0',
        '--matrix-lr=0.02 --embedding-lr=0.3 --unembedding-lr=0.008': '--config.optim.lr=0.02 '
        '--config.optim.embedding_lr=0.3 --config.optim.readout_lr=0.008',
    },
    'LitGPT': {
        '--train.max_steps 5': '--config.train.steps=5',
        '--train.lr_warmup_steps=200': '--config.optim.warmup_steps=200',
        '--precision bf16-true': '--config.model.dtype=bfloat16',
        '--data.train_data_path texts/': '--config.data.source=text:texts/',
        '--train.global_batch_size 512 --train.micro_batch_size 4 --devices 8': (
            '--config.data.batch_size=512 --config.train.microbatches=16'
        ),
    },
    'OLMo-core': {
        '--save-folder=out --name=first': '--workdir=out/first',
        '--train_module.optim.lr=6e-3': '--config.optim.lr=6e-3',
        '--load-path=out/run': '--config.train.init_from=out/run',
        '--trainer.no_checkpoints': '--config.train.checkpoint_every=0',
    },
    'axolotl': {
        '--micro-batch-size 2 --gradient-accumulation-steps 4': '--config.data.batch_size=8 '
        '--config.train.microbatches=4',
        '--sequence_len 2048 --sample_packing true': '--config.data.seq_len=2048 '
        '--config.data.packing=best_fit',
        '--val_set_size 0.1': '--config.data.validation_fraction=0.1',
        '--adapter lora --lora_r 16': '--config.model.reparam=lora --config.train.trainable=lora '
        '--config.reparam.rank=16',
    },
}
NOTHING_TO_SET, NOTHING_SENT = 'every step is compiled; there is nothing to set', 'nothing is sent'
IN_BUCKET, ON_THE_WEB = 'text:gs://BUCKET/GLOB', 'text is not read from the web'
NO_TEXT, NO_WEIGHTS = 'needs the extra hub', 'python -m eval.convert import-hf'
RESUMES = 'to resume, run the same command with the same --workdir'
# {program: {what is given: (words of the answer, flags whose names it holds; '' leaves it out)}}
NOT_HERE = {
    'nanoGPT': {
        '--compile=False': (NOTHING_TO_SET, ''),
        '--wandb': (NOTHING_SENT, ''),
        '--wandb_log=True --wandb_project=owt': (NOTHING_SENT, ''),
        '--dataset=openwebtext': (NO_TEXT, '--config.data.source=text:openwebtext/**/*.parquet'),
        '--dataset=shakespeare_char': (
            NO_TEXT,
            '--config.data.source=text:shakespeare/**/*.parquet',
        ),
        '--init_from=gpt2': (NO_WEIGHTS, '--config=configs/llama_124m.py'),
        '--init_from=resume': (RESUMES, '--workdir=runs/mine'),
        '--lr_decay_iters=5000': ('a schedule ends at', '--config.train.steps=5000'),
        '--min_lr=6e-5': ('a share of optim.lr', '--config.optim.final_lr_fraction=0.1'),
        '--device=cpu': ('JAX_PLATFORMS=cpu in the environment', ''),
        '--bias=False': ('or --config.norm.bias=False', '--config.model.bias=False'),
        'config/train_gpt2.py': ('pass the config as', '--config=configs/default.py'),
        '--nproc_per_node=8': ('one process uses all devices of its host', ''),
        '--start=FILE:prompt.txt': ('python -m eval.generate --checkpoint=WORKDIR', ''),
        '--max_new_tokens=500': ('python -m eval.generate --checkpoint=WORKDIR --tokens=N', ''),
    },
    'torchtitan': {
        '--training.dataset=c4': (NO_TEXT, '--config.data.source=text:c4/**/*.parquet'),
        '--training.compile': (NOTHING_TO_SET, ''),
        '--training.dataset_path=s3://bucket/data': (IN_BUCKET, ''),
        '--comm.init_timeout_seconds 600': ('all hosts must join', '--host_timeout=600'),
        '--parallelism.pipeline_parallel_degree=2': (
            'pipeline parallelism',
            '--config.mesh.fsdp=2',
        ),
        '--checkpoint.enable_checkpoint': (RESUMES, '--workdir=runs/mine'),
        '--metrics.enable_tensorboard': (NOTHING_SENT, ''),
        '--job.config_file=llama3_8b.toml': ('are Python files', '--config=configs/default.py'),
        '--profiling.enable_profiling': ('traces steps', '--config.train.profile=2:3'),
    },
    'Hugging Face': {
        '--report_to wandb': (NOTHING_SENT, ''),
        '--evaluation_strategy=steps': ('counted in steps', '--config.train.eval_every=100'),
        '--model_name_or_path=gpt2': (NO_WEIGHTS, '--config=configs/llama_124m.py'),
        '--model_name_or_path=openai-community/gpt2': (NO_WEIGHTS, ''),
        '--model_name_or_path=meta-llama/Llama-3.2-1B': (NO_WEIGHTS, ''),
        '--report_to=tensorboard': ('tensorboard --logdir=WORKDIR', ''),
        '--push_to_hub': ('a folder that transformers can load', ''),
        '--dataset_name=wikitext': (NO_TEXT, '--config.data.source=text:wikitext/**/*.parquet'),
        '--initializer_range=0.02': ('follows from their shape', '--config.scaling.init=fan_in'),
        '--warmup_ratio=0.03': ('set the warm-up in steps', '--config.optim.warmup_steps=50'),
        '--attn_implementation=sdpa': ('splash (TPU)', '--config.kernels.attention=auto'),
        '--lora_dropout=0.05': ('the factors of LoRA is not supported', ''),
        '--deepspeed=zero3.json': ('parameters, gradients and optimizer', '--config.mesh.fsdp=2'),
        '--resume_from_checkpoint=out/checkpoint-500': (RESUMES, '--workdir=runs/mine'),
        '--load_best_model_at_end': ('keeps the best checkpoints', '--config.train.keep_best=1'),
    },
    'MaxText': {
        'attention=flash': ('cudnn (NVIDIA, bfloat16)', '--config.kernels.attention=auto'),
        'dataset_type=hf': ('text comes from files', '--config.data.source=text:mine/*.txt'),
        'hf_path=allenai/c4': (NO_TEXT, '--config.data.source=text:c4/**/*.parquet'),
        'warmup_steps_fraction=0.1': ('the warm-up in steps', '--config.optim.warmup_steps=10'),
        'dataset_path=gs://bucket/data': (IN_BUCKET, ''),
        'tokenizer_path=meta-llama/Llama-3.1-8B': ('tokenizer.json --local-dir=DIR', ''),
        'profiler_steps=5': ('traces steps', '--config.train.profile=2:3'),
        'use_dpo=1': ('preference optimization', ''),
        'quantization=int8': ('trains with products of few bits', ''),
        'src/MaxText/configs/base.yml': (
            'is a config of another program',
            '--config=configs/default.py',
        ),
    },
    'Levanter': {
        '--optimizer.warmup=0.01': ('the warm-up in steps', '--config.optim.warmup_steps=10'),
        '--optimizer.warmup=inf': ('the warm-up in steps', '--config.optim.warmup_steps=10'),
        '--optimizer.decay=0.2': (
            'with a final decay',
            '--config.optim.schedule=warmup_stable_decay --config.optim.decay_fraction=0.2',
        ),
        '--model.type=mamba': ('such as Mamba and RWKV', ''),
        '--optimizer.type=mars': ('--choices=optim.name', ''),
        '--trainer.per_device_parallelism=4': (
            'number of devices',
            '--config.train.microbatches=4',
        ),
        '--trainer.axis_resources.mlp=model': ('share heads', '--config.mesh.tensor=2'),
        '--trainer.crash_on_nan=true': ('not finite', '--config.train.on_divergence=stop'),
        '--optimizer.default_weight_decay_mask=false': ('not to vectors', ''),
        '--trainer.per_device_eval_parallelism=4': (
            'evaluation uses',
            '--config.data.batch_size=4',
        ),
        '--trainer.tensor_parallel_axes=[mlp,heads]': (
            'heads, hidden features',
            '--config.mesh.tensor=2',
        ),
        '--trainer.checkpointer.save_interval=15m': (
            'in steps, not minutes',
            '--config.train.checkpoint_every=500',
        ),
        '--trainer.load_checkpoint=true': (RESUMES, '--workdir=runs/mine'),
        '--trainer.tracker.type=wandb': (NOTHING_SENT, ''),
        '--trainer.wandb.project=levanter': (NOTHING_SENT, ''),
        '--trainer.profiler=true': ('traces steps', '--config.train.profile=2:3'),
        '--trainer.require_accelerator=false': ('JAX_PLATFORMS=cpu in the environment', ''),
        '--model.attn_backend=jax_flash': ('splash (TPU)', '--config.kernels.attention=auto'),
        '--initialize_from_hf=meta-llama/Llama-2-7b-hf': (NO_WEIGHTS, ''),
        '--hf_save_path=out': ('python -m eval.convert export-hf --checkpoint=WORKDIR', ''),
        '--data.id=allenai/c4': (NO_TEXT, '--config.data.source=text:c4/**/*.parquet'),
        '--data.id=EleutherAI/pile': (NO_TEXT, '--config.data.source=text:pile/**/*.parquet'),
        '--data.shuffle=true': ('sequences are always shuffled', '--config.data.seed=1'),
        '--eval_harness.max_examples=10': ('--suite=harness:TASK+TASK', ''),
        '--data.train_urls=["https://host/a_*.jsonl.gz"]': (ON_THE_WEB, ''),
        '--data.train_weights={a: 1, b: 2}': (
            'sources and their weights',
            '''--config.data.mixture="{'a': (1, 'text:a/*.txt'), 'b': (2, 'text:b/*.txt')}"''',
        ),
    },
    'NanoDO': {
        '--config.opt.init_learning_rate=1e-4': (
            'a warm-up begins at',
            '--config.optim.warmup_steps=10',
        ),
        '--config.opt.final_learning_rate=1e-4': (
            'a share of optim.lr',
            '--config.optim.final_lr_fraction=0.1',
        ),
        '--config.eval_batch_size=8': ('evaluation uses', '--config.data.batch_size=8'),
        '--config.vocab_path=cc_all.model': ('bpe:SIZE', '--config.data.tokenizer=bpe:32000'),
        '--config.checkpoint=True': (RESUMES, '--workdir=runs/mine'),
        '--config.eval_split=test': ('is held out', '--config.data.validation_fraction=0.01'),
        '--config.eval_max_target_length=512': ('evaluation uses', '--config.data.seq_len=512'),
        '--config.log_internal_metrics=True': (
            'diagnostics of each layer',
            '--config.train.diagnose_every=10',
        ),
        '--config.write_to_xm_measurements=True': (NOTHING_SENT, ''),
        '--config.pygrain_worker_count=0': ('in advance', '--config.data.prefetch=2'),
    },
    'nanochat': {
        '--total-batch-size=524288': ('this counts tokens', '--config.data.batch_size=256'),
        '--target-param-data-ratio=12': ('the length of a run', '--config.train.steps=100'),
        '--core-metric-every=2000': ('--suite=harness:TASK+TASK', ''),
        '--resume-from-step=1000': (RESUMES, '--workdir=runs/mine'),
        '--device-type=cpu': ('JAX_PLATFORMS=cpu in the environment', ''),
    },
    'axolotl': {
        'config.yml': ('is a config of another program', '--config=configs/default.py'),
        '--load-in-8bit=True': ('halve weights and state', ''),
        '--lora_target_modules q_proj v_proj': ('--config.reparam.roles sets which matrices', ''),
    },
    'OLMo-core': {
        '--dry-run': ('--print_config prints all fields', ''),
        '--train_module.rank_microbatch_size=16384': (
            'this counts tokens',
            '--config.train.microbatches=4',
        ),
    },
    'LitGPT': {
        '--tasks hellaswag': ('--suite=harness:TASK+TASK', ''),
        '--data TextFiles': ('set the text with', '--config.data.source=text:mine/*.txt'),
        '--devices 4': ('all devices that it finds', ''),
        '--train.max_tokens 10000000': ('the length of a run', '--config.train.steps=100'),
    },
}
