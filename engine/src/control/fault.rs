//! How a lane ended, as the scheduler is told.

use crate::proto::paths::LaneFault;
use crate::transport::Cause;

/// Whether a lane ended in a way that its other end cannot have caused by closing it, and may not
/// have noticed: then this end has to tell of it. Any other end of a lane is seen by both, and an
/// honest rank that did not mean it says so.
#[must_use]
pub fn is_one_sided(cause: Cause) -> bool {
    match cause {
        Cause::Local | Cause::Peer | Cause::Truncated => false,
        Cause::Os(errno) => !matches!(errno, libc::ECONNRESET | libc::EPIPE),
        Cause::Unacknowledged { .. }
        | Cause::Seal(_)
        | Cause::RdmaEvent { .. }
        | Cause::Rdma { .. } => true,
    }
}

/// What a lane's cause means for the path between its ends.
#[must_use]
pub fn lane_fault(cause: Cause) -> LaneFault {
    match cause {
        Cause::Unacknowledged { milliseconds } => LaneFault::Unacknowledged { milliseconds },
        Cause::Local | Cause::Peer | Cause::Truncated => LaneFault::Closed,
        Cause::Os(_) | Cause::Seal(_) | Cause::RdmaEvent { .. } | Cause::Rdma { .. } => {
            LaneFault::Error(cause.to_string())
        }
    }
}
