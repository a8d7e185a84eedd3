//! How a lane ended, as the scheduler is told.

use crate::proto::paths::LaneFault;
use crate::transport::Cause;

/// What a lane's cause means for the path between its ends.
#[must_use]
pub fn lane_fault(cause: Cause) -> LaneFault {
    match cause {
        Cause::Unacknowledged { milliseconds } => LaneFault::Unacknowledged { milliseconds },
        Cause::Local | Cause::Peer | Cause::Truncated => LaneFault::Closed,
        Cause::Os(_) | Cause::RdmaEvent { .. } | Cause::Rdma { .. } => {
            LaneFault::Error(cause.to_string())
        }
    }
}
