"""Every name that we put on a span, a resource or a metric. Code uses these constants, never the literals."""

from __future__ import annotations

INSTRUMENTATION_SCOPE = "nemo.lens"  # of tracers and meters, as in Lens, so that its dashboards find ours
REDACTED = "[REDACTED]"

# --- spans ------------------------------------------------------------------------------------------------------------

SPAN_JOB = "train.job"
SPAN_MODEL_INIT = "train.model_init"
SPAN_ITERATION = "train.iteration"
SPAN_DATA_LOADING = "train.data_loading"
SPAN_FORWARD = "train.forward"
SPAN_BACKWARD = "train.backward"
SPAN_OPTIMIZER_STEP = "train.optimizer_step"
SPAN_EVALUATE = "train.evaluate"
SPAN_CHECKPOINT_SAVE = "checkpoint.save"
SPAN_CHECKPOINT_LOAD = "checkpoint.load"
SPAN_DISTRIBUTED_PREFIX = "torch.distributed."  # followed by the operation's name
SPAN_HANG = "lens.hang"  # from when on nothing happened until that was noticed
SPAN_FSDP_PREFIX = "fsdp."  # unshard, wait_for_unshard, reduce_scatter
SPAN_DDP_PREFIX = "ddp."  # forward, backward, communication
SPAN_PIPELINE_FORWARD = "pipeline.forward"
SPAN_PIPELINE_BACKWARD = "pipeline.backward"
SPAN_PIPELINE_SEND_FORWARD = "pipeline.send_forward"
SPAN_PIPELINE_RECV_FORWARD = "pipeline.recv_forward.linked"
SPAN_PIPELINE_SEND_BACKWARD = "pipeline.send_backward"
SPAN_PIPELINE_RECV_BACKWARD = "pipeline.recv_backward.linked"

# --- dl.*: distributed learning ---------------------------------------------------------------------------------------

DL_RANK = "dl.rank"
DL_WORLD_SIZE = "dl.world_size"
DL_LOCAL_RANK = "dl.local_rank"
DL_ITERATION = "dl.iteration"
DL_MICROBATCH_ID = "dl.microbatch_id"
DL_LOSS = "dl.loss"
DL_GRAD_NORM = "dl.grad_norm"
DL_LEARNING_RATE = "dl.learning_rate"
DL_BATCH_SIZE = "dl.batch_size"
DL_SEQUENCE_LENGTH = "dl.sequence_length"
DL_DATA_PARALLEL_RANK = "dl.data_parallel.rank"
DL_DATA_PARALLEL_SIZE = "dl.data_parallel.size"
DL_TENSOR_PARALLEL_RANK = "dl.tensor_parallel.rank"
DL_TENSOR_PARALLEL_SIZE = "dl.tensor_parallel.size"
DL_PIPELINE_PARALLEL_RANK = "dl.pipeline_parallel.rank"
DL_PIPELINE_PARALLEL_SIZE = "dl.pipeline_parallel.size"
DL_THROUGHPUT_TFLOPS = "dl.throughput_tflops"
DL_THROUGHPUT_TOKENS_PER_SEC = "dl.throughput_tokens_per_sec"

DL_DEVICE_DURATION_NS = "dl.device_duration_ns"  # of a phase or iteration, on the stream of the training thread
DL_DEVICE_MEMORY_ALLOCATED = "dl.device.memory.allocated"  # bytes, as torch's allocator counts, at the end
DL_DEVICE_MEMORY_RESERVED = "dl.device.memory.reserved"
DL_DEVICE_MEMORY_PEAK = "dl.device.memory.peak"  # of allocated, since the start or since the program reset it

DL_OPTIMIZER = "dl.optimizer"  # class name
DL_OPTIMIZER_SKIPPED = "dl.optimizer.skipped"
DL_BATCHES = "dl.batches"
DL_BATCH_INDEX = "dl.batch_index"  # in its pass over the loader, from 0
DL_LOADER_WORKERS = "dl.loader.workers"
DL_LOADER_EXHAUSTED = "dl.loader.exhausted"  # True: the fetch found no batch, the pass is over
DL_MODEL_WRAPPER = "dl.model.wrapper"  # class name
DL_PIPELINE_STAGE = "dl.pipeline.stage"

# Communication. The group's name and the sequence number name the same collective on every rank.
DL_COMM_GROUP = "dl.comm.group"
DL_COMM_SEQ = "dl.comm.seq"
DL_COMM_BYTES = "dl.comm.bytes"
DL_COMM_DTYPE = "dl.comm.dtype"
DL_COMM_GROUP_SIZE = "dl.comm.group_size"
DL_COMM_ASYNC = "dl.comm.async"
DL_COMM_EXPOSED_NS = "dl.comm.exposed_ns"  # how long the training thread was held
DL_COMM_DEVICE_DURATION_NS = "dl.comm.device_duration_ns"  # on its stream, waiting for other ranks included
DL_COMM_PEER = "dl.comm.peer"  # global rank
DL_COMM_TAG = "dl.comm.tag"
DL_COMM_LINK = "dl.comm.link"
DL_COMM_LINK_AMBIGUOUS = "ambiguous"
DL_COMM_COALESCED = "dl.comm.coalesced"
DL_COMM_GROUP_DESCRIPTION = "dl.comm.group_description"
DL_COMM_END = "dl.comm.end"
DL_COMM_END_UNKNOWN = "unknown"  # the program never called wait: the span ends with the call

DL_COMM_PEERS = "dl.comm.peers"  # global ranks
DL_MODEL_MODULE = "dl.model.module"  # its name in the model
DL_DDP_ITERATION = "dl.ddp.iteration"  # as the reducer counts
DL_DDP_BUCKET_SIZES = "dl.ddp.bucket_sizes"  # bytes of each
DL_DDP_BUCKETS = "dl.ddp.buckets"
DL_DDP_OVERLAP_NS = "dl.ddp.overlap_ns"  # of communication with backward

# Pipeline transfers carry these without a namespace.
PIPELINE_RANK = "rank"
PIPELINE_FROM_RANK = "from_rank"
PIPELINE_MICROBATCH_ID = "microbatch_id"

# --- lens.*: how a span came to be ------------------------------------------------------------------------------------

LENS_TIMING_SOURCE = "lens.timing_source"
TIMING_HOST = "host"
TIMING_HOST_ENQUEUE = "host_enqueue"  # the call enqueued device work: the end of the span is not the end of the work
TIMING_CUDA_EVENT = "cuda_event"
TIMING_DDP_LOGGER = "ddp_logger"
TIMING_FLIGHT_RECORDER = "flight_recorder"

LENS_INFERRED = "lens.inferred"  # no call was seen; the bounds follow from the spans around it
LENS_LINK_EXPORTED = "lens.link.exported"  # on a link; False: the span it names is on a rank that does not export
LENS_ITERATION_SKEW = "lens.iteration.skew"  # this rank's iteration number minus rank 0's, where they stay apart
LENS_HANG_OPERATION = "lens.hang.operation"
LENS_HANG_PHASE = "lens.hang.phase"
LENS_HANG_SINCE = "lens.hang.since"  # local time of the rank
LENS_HANG_STACKS = "lens.hang.stacks"  # of all threads, innermost frame first
LENS_HANG_FILE = "lens.hang.file"
LENS_RECORDS_DROPPED = "lens.records.dropped"

# --- nemo.* -----------------------------------------------------------------------------------------------------------

NEMO_RUN_ID = "nemo.run.id"
NEMO_USER_ID = "nemo.user.id"
NEMO_SPAN_TRUNCATED = "nemo.span.truncated"  # True: ended by shutdown, not by its own end
NEMO_GYM_ROLLOUT_ID = "nemo.gym.rollout.id"

# --- OpenTelemetry's own ----------------------------------------------------------------------------------------------

SERVICE_NAME = "service.name"
SERVICE_VERSION = "service.version"
SERVICE_INSTANCE_ID = "service.instance.id"
DEPLOYMENT_ENVIRONMENT = "deployment.environment"
HOST_NAME = "host.name"
HOST_GPU_COUNT = "host.gpu.count"
PROCESS_PID = "process.pid"
FILE_PATH = "file.path"
FILE_SIZE = "file.size"
EXCEPTION_TYPE = "exception.type"
EXCEPTION_MESSAGE = "exception.message"
EXCEPTION_STACKTRACE = "exception.stacktrace"
CODE_FILE_PATH = "code.file.path"
CODE_FUNCTION_NAME = "code.function.name"
CODE_LINE_NUMBER = "code.line.number"

# --- the environment that a rank runs in ------------------------------------------------------------------------------

SLURM_JOB_ID = "slurm.job.id"
SLURM_JOB_NAME = "slurm.job.name"
SLURM_NODELIST = "slurm.nodelist"
SLURM_NNODES = "slurm.nnodes"
SLURM_NTASKS = "slurm.ntasks"
SLURM_PARTITION = "slurm.partition"
SLURM_CLUSTER_NAME = "slurm.cluster.name"

K8S_NAMESPACE_NAME = "k8s.namespace.name"
K8S_POD_NAME = "k8s.pod.name"
K8S_POD_UID = "k8s.pod.uid"
K8S_NODE_NAME = "k8s.node.name"
K8S_CONTAINER_NAME = "k8s.container.name"
K8S_JOB_NAME = "k8s.job.name"

TORCHELASTIC_RUN_ID = "torchelastic.run_id"
TORCHELASTIC_RESTART_COUNT = "torchelastic.restart_count"
TORCHELASTIC_NODE_RANK = "torchelastic.node_rank"
TORCHELASTIC_LOCAL_RANK = "torchelastic.local_rank"
TORCHELASTIC_LOCAL_WORLD_SIZE = "torchelastic.local_world_size"
TORCHELASTIC_ROLE_NAME = "torchelastic.role_name"

WANDB_ENTITY = "wandb.entity"
WANDB_PROJECT = "wandb.project"

# --- metrics ----------------------------------------------------------------------------------------------------------

HW_ID = "hw.id"
HW_NAME = "hw.name"
HW_TYPE = "hw.type"
HW_TEMPERATURE = "hw.temperature"  # Cel
HW_POWER = "hw.power"  # W
HW_GPU_UTILIZATION = "hw.gpu.utilization"  # 1
HW_GPU_MEMORY_USAGE = "hw.gpu.memory.usage"  # By
HW_GPU_SPEED = "hw.gpu.speed"  # Hz
HW_GPU_THROTTLED = "hw.gpu.throttled"  # 1 or 0
HW_GPU_THROTTLE_REASON = "hw.gpu.throttle_reason"
HW_GPU_INDEX = "hw.gpu.index"  # as NVML counts

GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_TOKEN_TYPE = "gen_ai.token.type"
GEN_AI_SERVER_REQUEST_DURATION = "gen_ai.server.request.duration"  # s, histogram
GEN_AI_CLIENT_TOKEN_USAGE = "gen_ai.client.token.usage"  # {token}, histogram

RL_REWARD_MEAN = "rl.reward.mean"
RL_KL_DIVERGENCE = "rl.kl_divergence"
RL_POLICY_LOSS = "rl.policy_loss"
RL_VALUE_LOSS = "rl.value_loss"
RL_ENTROPY = "rl.entropy"
RL_RESPONSE_LENGTH_MEAN = "rl.response_length.mean"
RL_GRAD_NORM = "rl.grad_norm"
RL_LEARNING_RATE = "rl.learning_rate"
RL_THROUGHPUT_TOKENS_PER_SEC = "rl.throughput.tokens_per_sec"
RL_GENERATION_DURATION_MS = "rl.generation.duration_ms"  # histogram
RL_ROLLOUT_DURATION_MS = "rl.rollout.duration_ms"  # histogram

GYM_SERVER_REQUEST_DURATION_MS = "gym.server.request_duration_ms"  # histogram
GYM_ROLLOUT_DURATION_MS = "gym.rollout.duration_ms"  # histogram
GYM_VERIFY_DURATION_MS = "gym.verify.duration_ms"  # histogram
GYM_VERIFY_SUCCESS_RATE = "gym.verify.success_rate"
GYM_SERVERS_ACTIVE = "gym.servers.active"
