//! What the rounds of tensors with optimizers are for: all ranks of the job say the same, or it
//! ends with who said what.

#![forbid(unsafe_code)]

use super::{LaneId, LanePeer, Nic, PartId, Report};
use crate::base::error::{Disagreement, Misfit};
use bps_engine::base::{Key, Rank};
use bps_engine::optimize::Act;
use bps_engine::proto::messages::RoundOf;
use bps_engine::wire::Header;

impl Nic {
    /// This rank (`None`) or a peer of its group pushes the open round of a key that this rank
    /// sums. Says whether somebody has pushed it for something else, which is reported.
    pub(super) fn disagrees(
        &mut self,
        (key, part): (Key, Option<PartId>),
        round: u64,
        peer: Option<usize>,
        act: Act,
    ) -> bool {
        assert!(act != Act::NONE, "a step of a tensor with an optimizer");
        let device = part.is_some_and(|part| self.part(part).plan.device);
        let circle = self.circle_mut(device);
        let Err((said, by)) = circle.gathers.say(key, peer, act) else { return false };
        let rank = |peer: Option<usize>| {
            let lane = peer.map(|peer| self.circle(device).lanes[peer]);
            match lane.map(|lane| self.lane(lane).peer) {
                Some(LanePeer::Rank(rank)) => rank,
                _ => self.config.rank,
            }
        };
        let (first, second) = ((rank(by), said), (rank(peer), act));
        self.report_disagreement((key, part), round, first, second);
        true
    }

    /// A server has refused a contribution of this rank, since another rank pushed the round for
    /// something else.
    pub(super) fn contradicted(&mut self, lane: LaneId, header: &Header) -> Result<(), Misfit> {
        let part = self.known(header)?;
        let first = (Rank(header.contributors), Act::from_word(header.act));
        let second = (self.config.rank, self.part(part).act);
        self.close_lane(lane);
        debug_assert!(
            matches!(self.lane(lane).peer, LanePeer::Server(_)),
            "ranks answer otherwise"
        );
        self.report_disagreement((header.key, Some(part)), header.round.0, first, second);
        Ok(())
    }

    fn report_disagreement(
        &self,
        (key, part): (Key, Option<PartId>),
        round: u64,
        first: (Rank, Act),
        second: (Rank, Act),
    ) {
        let name = part.map(|part| self.part(part).plan.name.to_string());
        let tensor = name.unwrap_or_else(|| key.to_string());
        let at = RoundOf { tensor, round };
        self.report(Report::Disagree(Box::new(Disagreement { at, first, second })));
    }
}
