//! Who of a group has pushed the open round of a key. It knows no lane, no memory and no clock.

use bps_engine::base::{Key, KeyMap};
use bps_engine::optimize::Act;
use std::time::Duration;

/// A peer, and the open round of one key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Arrival {
    /// It has not pushed it.
    Awaited,
    /// It has.
    In,
    /// The tensor is not for it.
    Outside,
}

/// Who of the group has pushed the open round of one key.
struct Gather {
    /// Rounds that all had pushed.
    done: u64,
    own: bool,
    peers: Box<[Arrival]>,
    /// Peers that are awaited yet.
    left: usize,
    /// Of a tensor with an optimizer: what the open round is for, and the peer that said so first;
    /// none if that was this rank.
    said: Option<(Act, Option<usize>)>,
    /// When the first of the group pushed the open round.
    since: Option<Duration>,
}

/// What this rank's group has pushed of the keys that this rank owns.
pub struct Gathers {
    peers: usize,
    keys: KeyMap<Gather>,
}

/// A peer said what it can't say.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unfit {
    /// Of this round.
    #[error("{key}: round {round} was pushed already, or is not the open one ({open})")]
    Untimely {
        /// The part.
        key: Key,
        /// The round that it named.
        round: u64,
        /// The open one.
        open: u64,
    },
    /// Of this tensor.
    #[error("{key} is a part of a tensor for a set of ranks, of which it is none")]
    Outside {
        /// The part.
        key: Key,
    },
}

/// A round that some have pushed and others have not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unpushed {
    /// The part.
    pub key: Key,
    /// The open round.
    pub round: u64,
    /// Since when.
    pub since: Duration,
    /// Whether this rank has not pushed it.
    pub own_missing: bool,
    /// Peers that have not.
    pub peers_missing: Vec<usize>,
}

impl Gathers {
    /// For a group of this rank and so many others.
    #[must_use]
    pub fn new(peers: usize) -> Gathers {
        Gathers { peers, keys: KeyMap::default() }
    }

    /// Makes room for a key. Others of the group may have pushed it before this rank knows it.
    fn gather(&mut self, key: Key) -> &mut Gather {
        let peers = self.peers;
        self.keys.entry(key).or_insert_with(|| Gather {
            done: 0,
            own: false,
            peers: vec![Arrival::Awaited; peers].into(),
            left: peers,
            said: None,
            since: None,
        })
    }

    /// This rank owns the key, of a tensor for all of the group or, where that is given, for these
    /// peers and this rank.
    pub fn plan(&mut self, key: Key, among: Option<&[usize]>) {
        let gather = self.gather(key);
        let Some(among) = among else { return };
        for (at, peer) in gather.peers.iter_mut().enumerate() {
            if !among.contains(&at) {
                *peer = Arrival::Outside;
            }
        }
        gather.left = gather.awaited();
    }

    /// What the open round of a key is for, as this rank (`None`) or a peer says before it pushes
    /// it.
    ///
    /// # Errors
    /// What was said before and by whom, if it is something else.
    pub fn say(
        &mut self,
        key: Key,
        peer: Option<usize>,
        act: Act,
    ) -> Result<(), (Act, Option<usize>)> {
        let (said, by) = *self.gather(key).said.get_or_insert((act, peer));
        if said == act { Ok(()) } else { Err((said, by)) }
    }

    /// This rank pushes its next round of the key. Returns whether all have.
    pub fn own(&mut self, key: Key, now: Duration) -> bool {
        let gather = self.gather(key);
        gather.own = true;
        gather.pushed(now)
    }

    /// A peer has pushed a round. Returns whether all have.
    ///
    /// # Errors
    /// It is not the open round, that peer has pushed it before, or the tensor is not for it.
    pub fn peer(
        &mut self,
        key: Key,
        peer: usize,
        round: u64,
        now: Duration,
    ) -> Result<bool, Unfit> {
        let gather = self.gather(key);
        let open = gather.done + 1;
        match gather.peers[peer] {
            Arrival::Outside => return Err(Unfit::Outside { key }),
            Arrival::Awaited if round == open => {}
            Arrival::Awaited | Arrival::In => return Err(Unfit::Untimely { key, round, open }),
        }
        gather.peers[peer] = Arrival::In;
        gather.left -= 1;
        Ok(gather.pushed(now))
    }

    /// Keys that are known, declared by this rank or pushed by a peer.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The rounds that some have pushed and others have not, in no order.
    pub fn unpushed(&self) -> impl Iterator<Item = Unpushed> + '_ {
        self.keys.iter().filter_map(|(&key, gather)| {
            let since = gather.since?;
            let peers = gather.peers.iter().enumerate();
            Some(Unpushed {
                key,
                round: gather.done + 1,
                since,
                own_missing: !gather.own,
                peers_missing: peers
                    .filter(|(_, peer)| **peer == Arrival::Awaited)
                    .map(|(at, _)| at)
                    .collect(),
            })
        })
    }
}

impl Gather {
    fn awaited(&self) -> usize {
        self.peers.iter().filter(|peer| **peer == Arrival::Awaited).count()
    }

    fn pushed(&mut self, now: Duration) -> bool {
        let all = self.own && self.left == 0;
        if all {
            self.done += 1;
            self.own = false;
            self.said = None;
            for peer in self.peers.iter_mut().filter(|peer| **peer == Arrival::In) {
                *peer = Arrival::Awaited;
            }
            self.left = self.awaited();
            self.since = None;
        } else {
            self.since.get_or_insert(now);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_round_is_gathered_once_all_have_pushed_it_in_any_order() {
        let mut gathers = Gathers::new(2);
        // A peer is first: this rank has not even declared the key.
        assert_eq!(gathers.peer(Key(7), 1, 1, SECOND), Ok(false));
        gathers.plan(Key(7), None);
        assert!(!gathers.own(Key(7), 2 * SECOND));
        assert_eq!(gathers.peer(Key(7), 0, 1, 3 * SECOND), Ok(true));
        // The next one begins from nothing.
        assert!(!gathers.own(Key(7), 4 * SECOND));
        assert_eq!(gathers.peer(Key(7), 0, 2, 4 * SECOND), Ok(false));
        assert_eq!(gathers.peer(Key(7), 1, 2, 4 * SECOND), Ok(true));
        assert_eq!(gathers.unpushed().count(), 0);
    }

    #[test]
    fn a_round_that_is_not_open_or_pushed_twice_is_refused() {
        let mut gathers = Gathers::new(2);
        assert_eq!(gathers.peer(Key(7), 0, 1, SECOND), Ok(false));
        for (peer, round) in [(0, 1), (1, 2), (1, 0)] {
            let error = gathers.peer(Key(7), peer, round, SECOND).unwrap_err();
            assert_eq!(error, Unfit::Untimely { key: Key(7), round, open: 1 });
        }
    }

    #[test]
    fn a_set_is_gathered_without_the_others() {
        let mut gathers = Gathers::new(3);
        // Whoever is not of the set has pushed it before this rank knew of that.
        for peer in [0, 1] {
            assert_eq!(gathers.peer(Key(7), peer, 1, SECOND), Ok(false));
        }
        gathers.plan(Key(7), Some(&[1, 2]));
        for round in 1..4 {
            let is_in = round == 1 || gathers.peer(Key(7), 1, round, SECOND) == Ok(false);
            assert!(is_in && !gathers.own(Key(7), SECOND));
            let waiting: Vec<_> = gathers.unpushed().map(|one| one.peers_missing).collect();
            assert_eq!(waiting, [[2]]);
            let error = gathers.peer(Key(7), 0, round, SECOND);
            assert_eq!(error, Err(Unfit::Outside { key: Key(7) }));
            assert_eq!(gathers.peer(Key(7), 2, round, SECOND), Ok(true));
        }
    }

    #[test]
    fn a_round_is_for_what_the_first_has_said() {
        let (mut gathers, acts) = (Gathers::new(1), [Act::get(0), Act::get(1)]);
        assert_eq!(gathers.say(Key(7), Some(0), acts[0]), Ok(()));
        assert_eq!(gathers.peer(Key(7), 0, 1, SECOND), Ok(false));
        assert_eq!(gathers.say(Key(7), None, acts[1]), Err((acts[0], Some(0))));
        assert_eq!(gathers.say(Key(7), None, acts[0]), Ok(()));
        assert!(gathers.own(Key(7), SECOND));
        assert_eq!(gathers.say(Key(7), None, acts[1]), Ok(()), "it is another round");
        assert_eq!(gathers.say(Key(7), Some(0), acts[0]), Err((acts[1], None)));
    }

    #[test]
    fn who_has_not_pushed_is_known_whoever_it_is() {
        let mut gathers = Gathers::new(2);
        gathers.own(Key(1), SECOND);
        gathers.peer(Key(2), 1, 1, 2 * SECOND).unwrap();
        let mut waiting: Vec<Unpushed> = gathers.unpushed().collect();
        waiting.sort_by_key(|one| one.since);
        let seen: Vec<_> =
            waiting.iter().map(|one| (one.key, one.own_missing, &one.peers_missing[..])).collect();
        assert_eq!(seen, [(Key(1), false, &[0, 1][..]), (Key(2), true, &[0][..])]);
    }
}
