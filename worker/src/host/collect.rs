//! How the ranks of a group reduce a part among themselves: who has pushed it, in which order the
//! contributions are taken, and which bytes of them are there. It knows no lane's transport, no
//! memory and no clock; the NIC loop feeds it and does what it says.
//!
//! Each part has an owner in the group. The others tell it that they have pushed
//! ([`Gathers`](super::gather::Gathers)). Once all have, the owner grants them to send; it takes
//! the contributions in the order of its grants, all lanes in step ([`Collector`]), and adds what
//! has come of every one of them.
//!
//! Nothing that is not asked for is ever on a lane with its bytes, so a part that somebody has not
//! pushed keeps no other one waiting. Nor can grants wait for each other in a circle: of all
//! contributions in the group that are not yet in, look at the one whose grant was sent first.
//! Whatever stands before that grant or its answer on a lane is a word without payload, a
//! publication, which its reader always takes, or a contribution that was granted earlier and is
//! in.

use bps_engine::base::Key;
use bps_engine::mem::Readable;
use std::collections::VecDeque;
use std::sync::Arc;

/// Contributions that an owner asks for before the first of them is in.
pub const GRANTS_MAX: usize = 64;

/// What comes on a peer's lane.
#[derive(Clone, Copy)]
enum Coming {
    /// No contribution.
    Nothing,
    /// The header of one whose turn has not come.
    Held(Key),
    /// The payload of the one whose turn it is; what is there of it, if anything.
    Payload(Option<Readable>),
}

/// A part whose contributions were asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Granted<T> {
    /// The part.
    pub key: Key,
    /// Its size.
    pub bytes: usize,
    /// Whose it is, to the caller.
    pub item: T,
}

/// What to do about a contribution's header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// Let its payload come in pieces.
    Take,
    /// Let it stand: its turn will come.
    Hold,
    /// Nobody asked for it.
    Unknown,
}

/// Bytes to add now: every contribution's are there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ready<T> {
    /// The part.
    pub part: Granted<T>,
    /// First byte within the part.
    pub offset: usize,
    /// How many.
    pub length: usize,
}

/// The peers that contribute to a part; all where there is no list.
pub type Peers = Option<Arc<[usize]>>;

/// A part whose contributions are to come, and from whom.
struct Asked<T> {
    part: Granted<T>,
    peers: Peers,
}

impl<T> Asked<T> {
    fn is_of(&self, peer: usize) -> bool {
        self.peers.as_ref().is_none_or(|peers| peers.contains(&peer))
    }
}

/// The contributions to this rank's parts: in the order of the grants, all lanes in step.
pub struct Collector<T> {
    order: VecDeque<Asked<T>>,
    /// Bytes of the first part that have been added.
    done: usize,
    /// By peer.
    coming: Box<[Coming]>,
    /// By peer, where the bytes of the last [`ready`](Collector::ready) are.
    sources: Vec<*const u8>,
}

impl<T: Copy> Collector<T> {
    /// For so many peers.
    #[must_use]
    pub fn new(peers: usize) -> Collector<T> {
        Collector {
            order: VecDeque::with_capacity(GRANTS_MAX),
            done: 0,
            coming: vec![Coming::Nothing; peers].into(),
            sources: Vec::with_capacity(peers),
        }
    }

    /// Whether another part may be asked for.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.order.len() < GRANTS_MAX
    }

    /// Bytes of all parts that were asked for and are not whole.
    #[must_use]
    pub fn asked_bytes(&self) -> usize {
        self.order.iter().map(|asked| asked.part.bytes).sum()
    }

    /// Whether bytes of a contribution are lent to it.
    #[must_use]
    pub fn is_fed(&self) -> bool {
        self.coming.iter().any(|coming| matches!(coming, Coming::Payload(Some(_))))
    }

    /// These peers, of which there is one at least, are asked for a part.
    pub fn grant(&mut self, part: Granted<T>, peers: Peers) {
        self.order.push_back(Asked { part, peers });
    }

    /// The header of a contribution of so many bytes has come from a peer.
    pub fn header(&mut self, peer: usize, key: Key, bytes: usize) -> Admission {
        let Some(at) = self.order.iter().position(|asked| asked.part.key == key) else {
            return Admission::Unknown;
        };
        let asked = &self.order[at];
        let fits = asked.part.bytes == bytes && asked.is_of(peer);
        if !fits || !matches!(self.coming[peer], Coming::Nothing) {
            return Admission::Unknown;
        }
        // Each part is contributed to once by each peer: of the first one, nothing may have been
        // added before all are here.
        if at == 0 {
            self.coming[peer] = Coming::Payload(None);
            Admission::Take
        } else {
            self.coming[peer] = Coming::Held(key);
            Admission::Hold
        }
    }

    /// More of a peer's contribution is there. It is lent until [`added`](Collector::added) or
    /// [`remove`](Collector::remove) names the peer, or the peer is [`gone`](Collector::gone).
    ///
    /// # Panics
    /// None was to come.
    pub fn piece(&mut self, peer: usize, bytes: Readable) {
        let Coming::Payload(piece @ None) = &mut self.coming[peer] else {
            panic!("a peer's piece comes when its contribution is taken, one at a time")
        };
        *piece = Some(bytes);
    }

    /// What can be added, if anything; the addresses are in [`sources`](Collector::sources).
    pub fn ready(&mut self) -> Option<Ready<T>> {
        let front = self.order.front()?;
        let part = front.part;
        let mut length = part.bytes - self.done;
        self.sources.clear();
        for (peer, coming) in self.coming.iter().enumerate() {
            if !front.is_of(peer) {
                continue;
            }
            let Coming::Payload(Some(piece)) = coming else { return None };
            length = length.min(piece.len());
            self.sources.push(piece.as_ptr());
        }
        Some(Ready { part, offset: self.done, length })
    }

    /// By peer: where the bytes of the last [`ready`](Collector::ready) begin.
    #[must_use]
    pub fn sources(&self) -> &[*const u8] {
        &self.sources
    }

    /// So many bytes have been added. Calls `consumed` for each peer whose piece is used up, and
    /// returns the part if that was the last of it.
    pub fn added(&mut self, length: usize, mut consumed: impl FnMut(usize)) -> Option<Granted<T>> {
        self.done += length;
        for (peer, coming) in self.coming.iter_mut().enumerate() {
            let Coming::Payload(Some(piece)) = coming else { continue };
            if piece.len() == length {
                *coming = Coming::Payload(None);
                consumed(peer);
            } else {
                *piece = piece.behind(length);
            }
        }
        if self.order.front().is_none_or(|front| self.done < front.part.bytes) {
            return None;
        }
        self.done = 0;
        // What peers that it was not asked of have in line for a later part stands.
        for coming in self.coming.iter_mut().filter(|one| matches!(one, Coming::Payload(_))) {
            *coming = Coming::Nothing;
        }
        self.order.pop_front().map(|front| front.part)
    }

    /// A peer whose contribution has stood and may be taken now, if there is one.
    pub fn take_next(&mut self) -> Option<(usize, usize)> {
        let Granted { key: next, bytes, .. } = self.order.front()?.part;
        let is_next = |coming: &Coming| matches!(coming, Coming::Held(key) if *key == next);
        let peer = self.coming.iter().position(is_next)?;
        self.coming[peer] = Coming::Payload(None);
        Some((peer, bytes))
    }

    /// The lane of a peer is gone, and what has come on it: no part that it was asked for will ever
    /// be whole.
    pub fn gone(&mut self, peer: usize) {
        self.coming[peer] = Coming::Nothing;
    }

    /// Parts that will not be summed any more. Calls `removed` for each, and `dropped` for each
    /// peer of whose contribution to one of them a header or bytes have come.
    pub fn remove(
        &mut self,
        unwanted: impl Fn(&T) -> bool,
        mut removed: impl FnMut(&Granted<T>),
        mut dropped: impl FnMut(usize, Dropped),
    ) {
        let front = self.order.front().is_some_and(|front| unwanted(&front.part.item));
        for (peer, coming) in self.coming.iter_mut().enumerate() {
            let drop = match coming {
                Coming::Payload(piece) if front => {
                    let held = piece.map_or(0, Readable::len);
                    Dropped::Payload { left: self.order[0].part.bytes - self.done, held }
                }
                Coming::Held(key) => {
                    let part = self.order.iter().map(|asked| &asked.part);
                    let part = part.clone().find(|part| part.key == *key);
                    let Some(part) = part.filter(|part| unwanted(&part.item)) else { continue };
                    Dropped::Header { bytes: part.bytes }
                }
                _ => continue,
            };
            *coming = Coming::Nothing;
            dropped(peer, drop);
        }
        if front {
            self.done = 0;
        }
        self.order.retain(|asked| {
            let stays = !unwanted(&asked.part.item);
            if !stays {
                removed(&asked.part);
            }
            stays
        });
    }
}

/// What a lane was at when its part was removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dropped {
    /// A header was not answered.
    Header {
        /// Bytes that follow it.
        bytes: usize,
    },
    /// A payload is coming.
    Payload {
        /// Bytes of it that were not added.
        left: usize,
        /// Bytes of these that are there, in a piece that was not consumed.
        held: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What each peer sends of each part, cut into pieces of its own, and what comes of adding it.
    fn collect(pieces: [&[usize]; 2]) -> Vec<(u32, usize, usize)> {
        static MEMORY: [u8; 192] = [0; 192];
        let memory = Readable::from(&MEMORY[..]);
        let mut collector: Collector<u32> = Collector::new(2);
        for item in 0..2 {
            collector.grant(Granted { key: Key(u64::from(item)), bytes: 192, item }, None);
        }
        let mut left = pieces.map(|sizes| sizes.iter().copied().cycle());
        // By peer: the part, bytes of it that have been brought, and whether a piece is held.
        let mut at = [(0u64, 0usize, false); 2];
        let mut added = Vec::new();
        for turn in 0..1000 {
            let peer = turn % 2;
            let (part, done, held) = at[peer];
            if part < 2 && !held {
                let may = done > 0 || collector.header(peer, Key(part), 192) == Admission::Take;
                at[peer].2 = true;
                if may {
                    let length = left[peer].next().unwrap().min(192 - done);
                    collector.piece(peer, memory.part(done, length));
                    at[peer].1 += length;
                }
            }
            while let Some(ready) = collector.ready() {
                for source in collector.sources() {
                    assert_eq!(source.addr() - memory.as_ptr().addr(), ready.offset);
                }
                added.push((ready.part.item, ready.offset, ready.length));
                let whole = collector.added(ready.length, |peer| at[peer].2 = false);
                if whole.is_some() {
                    for peer in &mut at {
                        assert_eq!((peer.1, peer.2), (192, false));
                        *peer = (peer.0 + 1, 0, false);
                    }
                }
            }
        }
        assert_eq!(at.map(|peer| peer.0), [2, 2]);
        added
    }

    #[test]
    fn bytes_are_added_when_every_contribution_has_them() {
        assert_eq!(collect([&[192], &[192]]), [(0, 0, 192), (1, 0, 192)]);
        assert_eq!(collect([&[128, 64], &[64, 128]])[..3], [(0, 0, 64), (0, 64, 64), (0, 128, 64)]);
    }

    #[test]
    fn parts_of_sets_are_added_as_soon_as_their_peers_have_come() {
        let memory = Readable::from(&[0u8; 64][..]);
        let mut collector: Collector<u32> = Collector::new(3);
        collector.grant(Granted { key: Key(1), bytes: 64, item: 1 }, Some([0, 2].into()));
        collector.grant(Granted { key: Key(2), bytes: 64, item: 2 }, Some([1].into()));
        collector.grant(Granted { key: Key(3), bytes: 64, item: 3 }, None);
        assert_eq!(collector.header(1, Key(1), 64), Admission::Unknown, "it was not asked");
        // Its lane stands with what it has for the next part, while others bring this one.
        assert_eq!(collector.header(1, Key(2), 64), Admission::Hold);
        for peer in [0, 2] {
            assert_eq!(collector.ready(), None);
            assert_eq!(collector.header(peer, Key(1), 64), Admission::Take);
            collector.piece(peer, memory);
        }
        let ready = collector.ready().unwrap();
        assert_eq!((ready.part.item, collector.sources().len()), (1, 2));
        let mut consumed = Vec::new();
        assert_eq!(collector.added(64, |peer| consumed.push(peer)).unwrap().item, 1);
        assert_eq!(consumed, [0, 2]);
        // What others have for a part that is for all stands now.
        assert_eq!(collector.header(0, Key(3), 64), Admission::Hold);
        assert_eq!(collector.take_next(), Some((1, 64)));
        collector.piece(1, memory);
        assert_eq!(collector.ready().unwrap().part.item, 2);
        assert_eq!(collector.added(64, |_| {}).unwrap().item, 2);
        assert_eq!(collector.take_next(), Some((0, 64)));
        collector.piece(0, memory);
        assert_eq!(collector.ready(), None);
        for peer in [1, 2] {
            assert_eq!(collector.header(peer, Key(3), 64), Admission::Take);
            collector.piece(peer, memory);
        }
        assert_eq!(collector.ready().unwrap().part.item, 3);
    }

    #[test]
    fn a_later_part_stands_until_its_turn_and_a_stranger_is_refused() {
        let memory = Readable::from(&[0u8; 64][..]);
        let mut collector: Collector<u32> = Collector::new(2);
        collector.grant(Granted { key: Key(1), bytes: 64, item: 1 }, None);
        collector.grant(Granted { key: Key(2), bytes: 64, item: 2 }, None);
        assert_eq!(collector.header(0, Key(3), 64), Admission::Unknown);
        assert_eq!(collector.header(0, Key(1), 60), Admission::Unknown);
        assert_eq!(collector.header(0, Key(1), 64), Admission::Take);
        assert_eq!(
            collector.header(0, Key(2), 64),
            Admission::Unknown,
            "the first is still coming"
        );
        assert_eq!(collector.header(1, Key(2), 64), Admission::Hold, "out of turn, yet possible");
        assert_eq!(collector.take_next(), None);
        collector.piece(0, memory);
        assert_eq!(collector.ready(), None);
        // The first part is given up: its piece is the transport's again, and the other goes on.
        let mut dropped = Vec::new();
        collector.remove(|item| *item == 1, |_| {}, |peer, what| dropped.push((peer, what)));
        assert_eq!(dropped, [(0, Dropped::Payload { left: 64, held: 64 })]);
        assert_eq!(collector.take_next(), Some((1, 64)));
        assert_eq!(collector.header(0, Key(2), 64), Admission::Take);
        collector.piece(0, memory);
        collector.piece(1, memory);
        let ready = collector.ready().unwrap();
        assert_eq!((ready.part.item, ready.offset, ready.length), (2, 0, 64));
        assert_eq!(collector.added(64, |_| {}).unwrap().item, 2);
        assert!(collector.has_room());
    }
}
