//! The data of every error in one form, for callers that act on it.

use super::{Corruption, Death, Disagreement, Error, Overdue, Refusal, SettingError, StartError};
use crate::cuda::GpuError;
use bps_engine::base::Rank;
use bps_engine::harness::StillRunning;
use bps_engine::proto::messages::{
    Frameworks, Mismatch, Origin, OverReason, Party, RoundOf, Sign, Stall,
};
use bps_engine::proto::paths::{End, LaneFault, Member, PathStall};
use bps_engine::proto::unformed::Unformed;
use bps_engine::transport::Cause;
use std::time::Duration;

/// Whom and what an error is about. What does not apply, or is not known, is `None` or empty.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Details {
    /// The ranks that died, failed, disagree or are waited for, in rising order; of a path, the
    /// ranks at its ends.
    pub ranks: Vec<Rank>,
    /// Index of the server that died, failed or is at an end of the path.
    pub server: Option<u32>,
    /// Host of the process that died or failed; of several ranks that are waited for, of the first.
    pub host: Option<String>,
    /// Its process id there.
    pub pid: Option<u32>,
    /// Name of the tensor that was waited for, or that was open or the last one at this rank.
    pub tensor: Option<String>,
    /// Its round, counted from 1.
    pub round: Option<u64>,
    /// For how long the node was silent or was waited for when that was noticed.
    pub waited: Option<Duration>,
    /// The frameworks of ranks that disagree, where they have said.
    pub frameworks: Vec<(Rank, String)>,
}

impl Error {
    /// Whom and what it is about.
    #[must_use]
    pub fn details(&self) -> Details {
        match self {
            Error::Config(error) => Details::of_setting(error),
            Error::Start(error) => Details::of_start(error),
            Error::Mismatch(mismatch) => Details::of_mismatch(mismatch),
            Error::Disagree(disagreement) => {
                let Disagreement { at, first, second } = &**disagreement;
                Details::of_ranks([first.0, second.0]).or_round(Some(at))
            }
            Error::PeerDied(died) => {
                let details = Details::of_death(&died.death);
                details.or_round(died.at.as_ref().map(|at| &at.of))
            }
            Error::Corrupt(corruption) => Details::of_corruption(corruption),
            Error::Stalled(reason) => Details::of_verdict(reason),
            Error::Timeout(
                Overdue::Declare { waited }
                | Overdue::Root { waited }
                | Overdue::Barrier { waited }
                | Overdue::Gone { waited }
                | Overdue::HandOver { waited, .. }
                | Overdue::Ending(StillRunning { waited, .. }),
            ) => Details { waited: Some(*waited), ..Details::default() },
            Error::Refused(Refusal::Gpu(error)) => Details::of_gpu(error),
            // A rank that can't go on, most often because of its GPU.
            Error::Refused(Refusal::Own(source)) => {
                source.get().downcast_ref().map(Details::of_gpu).unwrap_or_default()
            }
            Error::Refused(refusal) => {
                Details { tensor: refusal.tensor().map(str::to_owned), ..Details::default() }
            }
            Error::Closed(_) => Details::default(),
        }
    }
}

impl Refusal {
    /// The name of the tensor that it is about.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Refusal::Plan { tensor, .. }
            | Refusal::Undeclared { tensor }
            | Refusal::OfGpu { tensor }
            | Refusal::Kept { tensor, .. }
            | Refusal::Act { tensor, .. }
            | Refusal::WholeAverage { tensor }
            | Refusal::PartsTooLarge { tensor, .. } => Some(tensor),
            Refusal::Scheduler(cause) => cause.tensor(),
            Refusal::Answers { .. }
            | Refusal::JoinedTwice
            | Refusal::UnknownId { .. }
            | Refusal::NoGpu
            | Refusal::Gpu(_)
            | Refusal::Own(_)
            | Refusal::TimelineOpen { .. }
            | Refusal::Timeline(_) => None,
        }
    }
}

impl Details {
    fn of_setting(error: &SettingError) -> Details {
        match error {
            SettingError::NoRdma { core, host } | SettingError::NoSharedMemory { core, host } => {
                let (server, host) = (Some(core.server), Some(host.clone()));
                Details { server, host, ..Details::default() }
            }
            SettingError::RingsDiffer { ranks, .. } => Details::of_ranks(*ranks),
            SettingError::Invalid(_) | SettingError::SecondGpu { .. } => Details::default(),
        }
    }

    fn of_start(error: &StartError) -> Details {
        match error {
            StartError::SchedulerSilent(silence) => {
                Details { waited: Some(silence.silent), ..Details::default() }
            }
            StartError::NoRoster { waited, .. } | StartError::ThreadSilent { waited, .. } => {
                Details { waited: Some(*waited), ..Details::default() }
            }
            StartError::NotFormed(reason) => Details::of_verdict(reason),
            StartError::Neighbour { peer, .. } | StartError::Lane { peer, .. } => {
                Details::of_origin(peer)
            }
            StartError::Core { core, host, pid, .. } => {
                let (server, host) = (Some(core.server), Some(host.clone()));
                Details { server, host, pid: Some(*pid), ..Details::default() }
            }
            StartError::GpuElsewhere { rank, .. } => Details::of_ranks([*rank]),
            StartError::SameGpu { ranks } | StartError::NcclDiffers { ranks, .. } => {
                Details::of_ranks(*ranks)
            }
            StartError::Resource { .. }
            | StartError::ThreadEnded { .. }
            | StartError::Listen { .. }
            | StartError::NoScheduler(_)
            | StartError::SchedulerLost { .. } => Details::default(),
            StartError::Gpu(error) => Details::of_gpu(error),
        }
    }

    fn of_gpu(error: &GpuError) -> Details {
        match error {
            GpuError::Order { from, .. } => Details::of_ranks([*from]),
            GpuError::Timeout { after, .. } => {
                Details { waited: Some(*after), ..Details::default() }
            }
            GpuError::NoDriver { .. }
            | GpuError::DriverTooOld { .. }
            | GpuError::NoFunction { .. }
            | GpuError::NoDevice { .. }
            | GpuError::Cuda { .. }
            | GpuError::Memory { .. }
            | GpuError::Direct { .. }
            | GpuError::NcclMissing { .. }
            | GpuError::NcclTooOld { .. }
            | GpuError::Nccl { .. } => Details::default(),
        }
    }

    fn of_corruption(corruption: &Corruption) -> Details {
        match corruption {
            Corruption::Payload { from, to, tensor, round, .. } => {
                let (tensor, round) = (tensor.clone(), Some(*round));
                Details { tensor, round, ..Details::default() }.with(&from.party).with(&to.party)
            }
            Corruption::Control(_) => Details::default(),
        }
    }

    fn of_mismatch(mismatch: &Mismatch) -> Details {
        let tensor = Some(mismatch.first_said.name.clone());
        let Frameworks { first, second } = mismatch.frameworks.clone();
        let said = [(mismatch.first, first), (mismatch.second, second)].into_iter();
        let frameworks = said.filter_map(|(rank, name)| Some((rank, name?))).collect();
        Details { tensor, frameworks, ..Details::of_ranks([mismatch.first, mismatch.second]) }
    }

    fn of_death(death: &Death) -> Details {
        match death {
            Death::Verdict(reason) => Details::of_verdict(reason),
            Death::SchedulerAway(away) => {
                Details { waited: Some(away.waited), ..Details::default() }
            }
            Death::SchedulerSilent(silence) => {
                Details { waited: Some(silence.silent), ..Details::default() }
            }
            Death::SchedulerLost { .. } | Death::SchedulerUnreachable { .. } => Details::default(),
            Death::LaneLost { peer, cause, at } => {
                let waited = match cause {
                    Cause::Unacknowledged { milliseconds } => Some(u64::from(*milliseconds)),
                    _ => None,
                };
                let waited = waited.map(Duration::from_millis);
                let details = Details { waited, ..Details::of_origin(peer) };
                details.or_round(at.as_ref().map(|at| &at.of))
            }
            Death::RootLost { root, of } => Details::of_ranks([*root]).or_round(Some(of)),
            Death::Nonsense { peer, misfit } => {
                let of = misfit.tensor();
                let of = of.map(|(tensor, round)| RoundOf { tensor: tensor.to_owned(), round });
                Details::of_origin(peer).or_round(of.as_ref())
            }
        }
    }

    fn of_verdict(reason: &OverReason) -> Details {
        let silence = |how: &Sign| match how {
            Sign::Silent { milliseconds } => Some(Duration::from_millis(*milliseconds)),
            Sign::Seen(_) => None,
        };
        match reason {
            OverReason::Finished | OverReason::UnknownEpoch { .. } => Details::default(),
            OverReason::NotFormed { cause } => {
                let waited = match cause {
                    Unformed::Missing { waited_ms, .. }
                    | Unformed::NotSuspended { waited_ms, .. } => {
                        Some(Duration::from_millis(*waited_ms))
                    }
                    _ => None,
                };
                let about = match cause {
                    Unformed::NotSuspended { ranks, .. } => {
                        Details::of_ranks(ranks.iter().copied().map(Rank))
                    }
                    _ => cause.who().map(Details::of_origin).unwrap_or_default(),
                };
                Details { waited, ..about }
            }
            OverReason::Reforming { reason, .. } | OverReason::TooFew { reason, .. } => {
                Details::of_verdict(reason)
            }
            OverReason::Died { who, how, .. } => {
                Details { waited: silence(how), ..Details::of_origin(who) }
            }
            OverReason::Removed { how } => Details { waited: silence(how), ..Details::default() },
            OverReason::Failed { who, round, .. } => {
                Details::of_origin(who).or_round(round.as_ref())
            }
            OverReason::Left { who } => Details::of_origin(who),
            OverReason::PathLost(loss) => {
                let waited = match loss.fault {
                    LaneFault::Unacknowledged { milliseconds } => Some(milliseconds.into()),
                    LaneFault::Closed | LaneFault::Error(_) => None,
                };
                let waited = waited.map(Duration::from_millis);
                Details { waited, ..Details::default() }
                    .with(&loss.from.end.into())
                    .with(&loss.to.end.into())
            }
            OverReason::PathStalled { stalls, .. } => {
                stalls.first().map_or_else(Details::default, Details::of_path_stall)
            }
            OverReason::Stalled { stalls, members } => {
                Details::of_stalls(stalls, members, |stall| &stall.missing)
            }
            OverReason::Abandoned { stalls, members } => {
                Details::of_stalls(stalls, members, |stall| &stall.left)
            }
        }
    }

    /// The oldest stall, the ranks for which any of them waits, and where the first of these runs.
    fn of_stalls(
        stalls: &[Stall],
        members: &[Member],
        ranks: impl Fn(&Stall) -> &[Rank],
    ) -> Details {
        let details = Details::of_ranks(stalls.iter().flat_map(|stall| ranks(stall).to_vec()));
        let Some(oldest) = stalls.first() else { return details };
        let first = details.ranks.first().map(|rank| End::Rank(*rank));
        let first = members.iter().find(|member| Some(member.end) == first);
        Details {
            tensor: Some(oldest.name.clone()),
            round: Some(oldest.round),
            waited: Some(Duration::from_millis(oldest.waited_ms)),
            host: first.map(|member| member.host.clone()),
            pid: first.map(|member| member.pid),
            ..details
        }
    }

    fn of_path_stall(stall: &PathStall) -> Details {
        Details {
            server: Some(stall.server),
            tensor: Some(stall.name.clone()),
            round: Some(stall.round),
            waited: Some(Duration::from_millis(stall.waited_ms)),
            ..Details::of_ranks([stall.rank])
        }
    }

    fn of_ranks(ranks: impl IntoIterator<Item = Rank>) -> Details {
        let mut ranks: Vec<Rank> = ranks.into_iter().collect();
        ranks.sort_unstable();
        ranks.dedup();
        Details { ranks, ..Details::default() }
    }

    fn of_origin(origin: &Origin) -> Details {
        let host = origin.place.as_ref().map(|place| place.host.clone());
        let pid = origin.place.as_ref().map(|place| place.pid);
        Details { host, pid, ..Details::default() }.with(&origin.party)
    }

    /// It is about this party as well.
    fn with(mut self, party: &Party) -> Details {
        match party {
            Party::Rank(rank) => {
                self.ranks.push(*rank);
                self.ranks.sort_unstable();
            }
            Party::Server(index) => self.server = Some(*index),
            Party::Scheduler | Party::Unplaced(_) => {}
        }
        self
    }

    /// It is about this round, unless it is about another.
    fn or_round(mut self, of: Option<&RoundOf>) -> Details {
        if let (None, Some(of)) = (&self.tensor, of) {
            (self.tensor, self.round) = (Some(of.tensor.clone()), Some(of.round));
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Misfit, PartMisfit, PeerDied, RoundSeen, Unasked};
    use super::*;
    use bps_engine::base::Key;
    use bps_engine::proto::messages::Place;
    use bps_engine::wire::Kind;
    use std::sync::Arc;

    fn origin(party: Party) -> Origin {
        Origin { party, place: Some(Place { host: "a".into(), pid: 7 }) }
    }

    fn seen() -> Option<RoundSeen> {
        Some(RoundSeen { of: RoundOf { tensor: "w".into(), round: 3 }, is_open: true })
    }

    #[test]
    fn a_death_has_who_where_since_when_and_what_this_rank_was_at() {
        let how = Sign::Silent { milliseconds: 4_250 };
        let reason = OverReason::Died { who: origin(Party::Server(1)), how, rounds: 9 };
        let death = Death::Verdict(Arc::new(reason));
        let error = Error::from(PeerDied { death, at: seen() });
        assert_eq!(
            error.to_string(),
            "server 1 (host a, pid 7) died after at least 9 rounds: no heartbeat for 4.2 s: its \
             own log says why; round 3 of `w` was open"
        );
        let expected = Details {
            ranks: vec![],
            server: Some(1),
            host: Some("a".into()),
            pid: Some(7),
            tensor: Some("w".into()),
            round: Some(3),
            waited: Some(Duration::from_millis(4_250)),
            frameworks: Vec::new(),
        };
        assert_eq!(error.details(), expected);
    }

    #[test]
    fn a_failure_keeps_its_own_round_and_a_lost_lane_both_its_end_and_its_cause() {
        let round = Some(RoundOf { tensor: "x".into(), round: 8 });
        let who = origin(Party::Rank(Rank(2)));
        let reason = OverReason::Failed { who: who.clone(), message: "no memory".into(), round };
        let death = Death::Verdict(Arc::new(reason));
        let details = Error::from(PeerDied { death, at: seen() }).details();
        assert_eq!((details.tensor.as_deref(), details.round), (Some("x"), Some(8)));
        assert_eq!(details.ranks, [Rank(2)]);
        let cause = Cause::Unacknowledged { milliseconds: 9_000 };
        let lost = Death::LaneLost { peer: who, cause, at: seen() };
        let error = Error::from(PeerDied::from(lost));
        assert_eq!(
            error.to_string(),
            "the lane to rank 2 (host a, pid 7) was lost (round 3 of `w` was open): nothing that \
             was sent was acknowledged for 9.0 s"
        );
        let details = error.details();
        assert_eq!((details.ranks, details.round), (vec![Rank(2)], Some(3)));
        assert_eq!(details.waited, Some(Duration::from_secs(9)));
    }

    #[test]
    fn nonsense_has_its_sender_and_the_part_that_it_is_about() {
        let misfit = Misfit::Part(PartMisfit {
            what: Unasked::Grant,
            tensor: "x".into(),
            key: Key(7),
            round: 9,
            bytes: 0,
            part_bytes: 64,
            open: 2,
        });
        let details = |misfit| {
            let death = Death::Nonsense { peer: origin(Party::Rank(Rank(2))), misfit };
            Error::from(PeerDied { death, at: seen() }).details()
        };
        let of_part = details(misfit);
        assert_eq!((of_part.tensor.as_deref(), of_part.round), (Some("x"), Some(2)));
        assert_eq!((of_part.ranks, of_part.pid), (vec![Rank(2)], Some(7)));
        let of_none = details(Misfit::NotOfServer(Kind::Ready));
        assert_eq!((of_none.tensor.as_deref(), of_none.round), (Some("w"), Some(3)));
        assert_eq!(of_none.ranks, [Rank(2)]);
    }

    #[test]
    fn an_error_of_the_gpu_has_its_rank_and_its_wait_in_every_form() {
        use super::super::Source;
        use crate::cuda::{Awaited, Breach};
        let order = GpuError::Order { from: Rank(3), breach: Breach::NotLeader };
        let after = Duration::from_secs(60);
        let late = GpuError::Timeout { awaited: Awaited::Enqueueing, after };
        let forms: [fn(GpuError) -> Error; 3] = [
            |error| StartError::Gpu(error).into(),
            |error| Refusal::Gpu(error).into(),
            |error| Refusal::Own(Source::new(error)).into(),
        ];
        for form in forms {
            let details = form(order.clone()).details();
            assert_eq!((details.ranks, details.waited), (vec![Rank(3)], None));
            let details = form(late.clone()).details();
            assert_eq!((details.ranks, details.waited), (vec![], Some(after)));
            let old = GpuError::DriverTooOld { found: 11_040, needed: 12_000 };
            assert_eq!(form(old).details(), Details::default());
        }
        let other = Refusal::Own(Source::new(std::io::Error::other("no memory")));
        assert_eq!(Error::from(other).details(), Details::default());
    }

    #[test]
    fn a_stall_has_the_oldest_round_and_every_rank_that_is_missing() {
        let stall = |name: &str, missing: &[u32]| Stall {
            name: name.into(),
            round: 5,
            waited_ms: 60_000,
            arrived: vec![Rank(0)],
            missing: missing.iter().copied().map(Rank).collect(),
            left: vec![Rank(1)],
        };
        let stalls = vec![stall("v", &[3, 1]), stall("w", &[1, 2])];
        let member =
            |rank, pid| Member { end: End::Rank(Rank(rank)), host: format!("h{rank}"), pid };
        let members = vec![member(3, 7), member(1, 8)];
        let reason = OverReason::Stalled { stalls: stalls.clone(), members: members.clone() };
        let details = Error::Stalled(Arc::new(reason)).details();
        assert_eq!((details.host.as_deref(), details.pid), (Some("h1"), Some(8)));
        assert_eq!(details.ranks, [Rank(1), Rank(2), Rank(3)]);
        assert_eq!((details.tensor.as_deref(), details.round), (Some("v"), Some(5)));
        assert_eq!(details.waited, Some(Duration::from_secs(60)));
        let left = Error::Stalled(Arc::new(OverReason::Abandoned { stalls, members }));
        let details = left.details();
        assert_eq!((details.ranks, details.pid), (vec![Rank(1)], Some(8)));
    }
}
