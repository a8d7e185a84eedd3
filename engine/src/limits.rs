//! Every bound in one place, with the relations between them checked at compile time.

#![forbid(unsafe_code)]

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 64;
/// Alignment of slots, accumulators and scratch: a cache line and an AVX-512 register.
pub const ALIGNMENT: usize = 64;
/// A tensor is cut finer than the partition says, so that each rank of a group sums a share of it,
/// but not into parts smaller than this.
pub const GROUP_PART_BYTES_MIN: usize = 64 << 10;
/// A tensor that servers sum is cut finer than the partition says, into so many parts for each
/// server: a server answers one while it takes in the next.
pub const SERVER_PARTS: usize = 4;
/// Such a part is at most a multiple of so many bytes. With its header, this is no more than what
/// the kernel hands over at once (45 segments of 1448 bytes in packets of 1500, and 7 of 8948 in
/// packets of 9000): a few bytes more travel late.
pub const SERVER_PART_BYTES: usize = 60 << 10;
/// A tensor of at most so many bytes is not cut for the servers' sake.
pub const SERVER_WHOLE_BYTES: usize = 64 << 10;
/// Largest payload of one frame: a part is never larger.
pub const PART_BYTES_MAX: usize = 64 << 20;
/// Smallest partition size that the configuration accepts.
pub const PART_BYTES_MIN: usize = 4096;
/// Bytes of the scratch through which later contributions pass on their way into an accumulator. It
/// stays in L2, so that a byte summed is a byte still in cache.
pub const SCRATCH_BYTES: usize = 256 << 10;
/// A frame whose payload is at most this is small: it may share a send and a receive with its
/// neighbours.
pub const SMALL_BYTES: usize = 16 << 10;
/// Bytes of the buffer through which runs of small frames are received.
pub const STAGING_BYTES: usize = 256 << 10;
/// Bytes of each of the two buffers of records of an encrypted stream socket: they stay in L2.
pub const SEALED_BYTES: usize = 264 << 10;
/// Frames that may be posted to one lane and not yet be sent.
pub const LANE_FRAMES_MAX: usize = 256;
/// Bytes that one send or receive call of a stream socket moves at most, so that no lane keeps
/// others waiting.
pub const OPERATION_BYTES_MAX: usize = 1 << 20;
/// Bytes that the kernel may hold of one stream socket and not have sent: they can't be overtaken.
pub const UNSENT_BYTES_MAX: i32 = 128 << 10;
/// Pieces of memory that one send of a stream socket gathers at most.
pub const GATHER_MAX: usize = 64;
/// Places for answers that a rank may have open at once on one lane.
pub const GRANTS_MAX: usize = 64;
/// Events that one poll returns at most.
pub const EVENTS_MAX: usize = 256;
/// Ranks of one job.
pub const RANKS_MAX: usize = 4096;
/// Ranks that an epoch goes on without at most: a result has a bit for each.
pub const GONE_MAX: usize = 64;
/// Servers of one job.
pub const SERVERS_MAX: usize = 1024;
/// Cores of one server.
pub const CORES_MAX: usize = 256;
/// Bytes of a tensor's name.
pub const NAME_BYTES_MAX: usize = 1024;
/// Dimensions of a tensor; no framework that we know has more.
pub const DIMENSIONS_MAX: usize = 64;
/// Tensors of one job.
pub const TENSORS_MAX: usize = 1 << 20;
/// Declarations of one name that one rank may be ahead of another.
pub const ERAS_MAX: usize = 1024;
/// Parts of one job.
pub const PARTS_MAX: usize = 1 << 22;
/// Parts of the tensors that one request declares: their keys fit into one control message.
pub const DECLARE_PARTS_MAX: usize = 1 << 18;
/// Tensors that are cut anew at once, which one control message describes.
pub const RECUT_TENSORS_MAX: usize = 1 << 14;
/// Ranks that the sets of all tensors of one request name, and those of all their parts.
pub const DECLARE_MEMBERS_MAX: usize = 1 << 22;
/// Ranks of a job in which rounds may be short: results say by so many bits whom they lack.
pub const BACKUP_RANKS_MAX: u32 = u64::BITS;
/// Rounds that a rank may be behind in one: a server keeps as many results.
pub const BEHIND_MAX: u32 = 64;
/// Barriers that one rank may have open at once.
pub const BARRIERS_MAX: usize = 64;
/// Bytes of one control message, after authentication.
pub const CONTROL_BYTES_MAX: usize = 64 << 20;
/// Events of one thread's timeline that may wait to be written.
pub const TIMELINE_EVENTS_MAX: usize = 1 << 16;
/// Seconds that a connection has to authenticate itself.
pub const HANDSHAKE_SECONDS: u64 = 5;
/// Connections of one process that may be unauthenticated at once.
pub const HANDSHAKES_MAX: usize = 1024;

const _: () = assert!(HEADER_BYTES == ALIGNMENT);
const _: () = assert!(SCRATCH_BYTES.is_multiple_of(ALIGNMENT));
const _: () = assert!(SMALL_BYTES + HEADER_BYTES <= STAGING_BYTES);
const _: () = assert!(SMALL_BYTES < OPERATION_BYTES_MAX && SCRATCH_BYTES <= OPERATION_BYTES_MAX);
const _: () = assert!(PART_BYTES_MIN <= GROUP_PART_BYTES_MIN);
const _: () = assert!(SERVER_PARTS > 0 && SERVER_PART_BYTES.is_multiple_of(ALIGNMENT));
const _: () = assert!(SERVER_PART_BYTES + HEADER_BYTES <= 7 * 8948);
const _: () = assert!(PART_BYTES_MIN <= PART_BYTES_MAX && PART_BYTES_MAX <= u32::MAX as usize);
// A part takes about 100 bytes of text in `Declared` or `Install`, and a rank of its set at most 5.
const _: () = assert!(DECLARE_PARTS_MAX * 128 + DECLARE_MEMBERS_MAX * 5 <= CONTROL_BYTES_MAX);
// Half as many parts, and about 700 bytes of text beside the name of each tensor.
const _: () = assert!(
    DECLARE_PARTS_MAX / 2 * 128 + RECUT_TENSORS_MAX * (2 * NAME_BYTES_MAX + 700)
        <= CONTROL_BYTES_MAX
);
const _: () = assert!(RANKS_MAX <= 10_000);
