//! To be written.

use super::{Driver, Event, Frame, Full, Landing, LaneId, Link};
use std::time::Duration;

/// Placeholder.
pub struct ShmLink;

/// Placeholder.
pub struct Shm;

impl Driver for Shm {
    fn attach(&mut self, _: LaneId, _: Link) -> std::io::Result<()> {
        unreachable!()
    }
    fn post(&mut self, _: LaneId, _: &Frame) -> Result<(), Full> {
        unreachable!()
    }
    fn land(&mut self, _: LaneId, _: Landing, _: usize) {}
    fn consume(&mut self, _: LaneId) {}
    fn close(&mut self, _: LaneId) {}
    fn poll(&mut self, _: &mut Vec<Event>) {}
    fn block(&mut self, _: Duration) {}
}
