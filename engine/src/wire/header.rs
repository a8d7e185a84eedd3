//! The fixed 64-byte little-endian header in front of every payload.
//!
//! | bytes | field | meaning |
//! |---|---|---|
//! | 0..4 | magic | `b"BPS1"` |
//! | 4 | version | [`VERSION`] |
//! | 5 | kind | [`Kind`] |
//! | 6 | flags | [`FLAG_PAYLOAD_CHECKSUM`], [`FLAG_SCALED`], [`FLAG_RESULT`], those of [`Form`] |
//! | 7 | dtype | element type of the payload, [`DType`]'s number |
//! | 8..12 | rank | who sent it; a publication and a grant name the rank that they are for |
//! | 12..16 | epoch | membership generation |
//! | 16..24 | key | the part |
//! | 24..32 | round | step of the key, from 1 |
//! | 32..40 | offset | first byte of the payload within the part |
//! | 40..44 | length | bytes of payload that follow |
//! | 44..48 | contributors | contributions in the payload: what an average divides by |
//! | 48..52 | payload checksum | CRC-32C of the payload if flagged, else zero |
//! | 52..60 | act, missing | of a result, or news of it [`Header::missing`], else [`Header::act`] |
//! | 60..64 | header checksum | CRC-32C of bytes 0..60 |
//!
//! The checksum is the last field so that a header cut short or overwritten never passes by
//! accident.

use super::crc32c;
use crate::base::{DType, Epoch, Key, Rank, Round};
use crate::limits::{HEADER_BYTES, PART_BYTES_MAX};

/// A header as it travels.
pub type RawHeader = [u8; HEADER_BYTES];

/// First bytes of every frame.
pub const MAGIC: [u8; 4] = *b"BPS1";
/// Version of the wire. Both ends must have the same.
pub const VERSION: u8 = 1;
/// The payload checksum field holds the CRC-32C of the payload.
pub const FLAG_PAYLOAD_CHECKSUM: u8 = 1;

/// The payload is a sum of several contributions to an f16 average, divided by [`scale`] of their
/// number, so that it does not overflow where the average does not.
pub const FLAG_SCALED: u8 = 2;

/// The payload of a contribution is no contribution but the round's result, as this rank had it of
/// a server that is lost. Contributors and missing ranks are those of the result.
pub const FLAG_RESULT: u8 = 16;

/// By what a sum of so many contributions is divided if [`FLAG_SCALED`] is set: a power of two, so
/// that nothing is rounded but what comes below the smallest normal f16.
#[must_use]
pub const fn scale(contributors: u32) -> u32 {
    contributors.next_power_of_two()
}

/// As what a payload travels of a tensor whose encoding leaves that to who sends it, from what is
/// longest to what is shortest. All others travel as they were declared.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Form {
    /// The elements as they are.
    Plain,
    /// The elements as bf16.
    Half,
    /// As the tensor was declared.
    Declared,
}

impl Form {
    const ALL: [Form; 3] = [Form::Plain, Form::Half, Form::Declared];
    /// Its bits of the flags.
    const MASK: u8 = 4 | 8;

    /// What it adds to the flags.
    #[must_use]
    pub const fn flag(self) -> u8 {
        match self {
            Form::Plain => 4,
            Form::Half => 8,
            Form::Declared => 0,
        }
    }

    fn of(flags: u8) -> Option<Form> {
        Form::ALL.into_iter().find(|form| form.flag() == flags & Form::MASK)
    }
}

/// [`Header::act`] of a `Goodbye`: the rank only suspends, and means to come back.
pub const COMES_BACK: u64 = 1;

/// What a frame is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Worker to server: one group's part of a round. It is also the request for the result.
    /// Worker to worker of a host: one rank's part, for the owner of the key to add.
    Contribution = 1,
    /// Server to worker, and from there to the other workers of the group: the result of a round.
    Publication = 2,
    /// Either way: no more frames follow, the lane is closed in good order.
    Goodbye = 3,
    /// Server to worker: the frame with this key and round was refused; the lane closes.
    Refused = 4,
    /// Worker to a worker of its host, the owner of the key: this rank has pushed the round.
    Ready = 5,
    /// The answer to `Ready` once all ranks of the host have pushed: send the contribution.
    Grant = 6,
    /// Worker to the worker of its host that gives the order: this rank's tensor on the GPU that
    /// begins with this key is pushed.
    GpuReady = 7,
    /// The order, to all ranks of the host: reduce the row of parts that begins with this key. The
    /// number of `contributors` says how many words of the same batch follow, this one included.
    GpuReduce = 8,
    /// Worker to the worker that gives the order: this rank's parts of the row's result are on
    /// their way to its GPU.
    GpuLanded = 9,
    /// The order, to all ranks of the host: gather the row. `contributors` as in `GpuReduce`.
    GpuGather = 10,
    /// The ranks of the job disagree about the tensor that begins with this key. To who gives the
    /// order: order nothing more of it; from there to all ranks of the host: nothing more is.
    GpuEnd = 11,
}

/// A header, parsed. [`Header::encode`] and [`Header::decode`] are each other's inverse.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// What the frame is.
    pub kind: Kind,
    /// See [`FLAG_PAYLOAD_CHECKSUM`], [`FLAG_SCALED`], [`FLAG_RESULT`] and [`Form`].
    pub flags: u8,
    /// Element type of the payload.
    pub dtype: DType,
    /// Who sent it, or whom a server addresses.
    pub rank: Rank,
    /// Membership generation.
    pub epoch: Epoch,
    /// The part.
    pub key: Key,
    /// Step of the key, from 1.
    pub round: Round,
    /// First byte of the payload within the part.
    pub offset: u64,
    /// Bytes of payload.
    pub length: u32,
    /// Contributions in the payload.
    pub contributors: u32,
    /// CRC-32C of the payload, or zero.
    pub payload_checksum: u32,
    /// What the round is for, where the tensor has an optimizer; else zero.
    pub act: u64,
    /// Of a publication, and of a result that is given back: a bit for each rank without a
    /// contribution in the payload, because it has died, or is late for a tensor whose rounds do
    /// not wait for slow ranks. Bit n is rank n, but in a job of [more ranks than there are
    /// bits](missing_by_rank) that of the n-th death that the scheduler has told of; no round of
    /// those there leaves out late ranks from number 64 on.
    pub missing: u64,
}

/// Whether bit n of [`Header::missing`] is rank n in a job of so many ranks. If there were an order
/// of deaths to know, whoever follows a scheduler that knows of another one would take one rank for
/// another.
#[must_use]
pub fn missing_by_rank(ranks: u32) -> bool {
    ranks <= u64::BITS
}

/// Why 64 bytes are not a header of ours: the first field that is wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Invalid {
    /// The magic differs.
    #[error("the first bytes are {0:02x?}, not a frame of this protocol")]
    Magic([u8; 4]),
    /// The version differs.
    #[error("wire version {0}, this end speaks {VERSION}: run the same release everywhere")]
    Version(u8),
    /// The header checksum differs.
    #[error("header checksum {found:#010x}, computed {computed:#010x}")]
    Checksum {
        /// What the header says.
        found: u32,
        /// What its bytes give.
        computed: u32,
    },
    /// No such kind.
    #[error("unknown kind {0}")]
    Kind(u8),
    /// A flag that this version does not know.
    #[error("unknown flags {0:#04x}")]
    Flags(u8),
    /// No such data type.
    #[error("unknown data type {0}")]
    DType(u8),
    /// A field that the kind has no use for is not zero.
    #[error("reserved bytes are not zero")]
    Reserved,
    /// More payload than a part may have.
    #[error("length {0} is over the limit of {PART_BYTES_MAX} bytes")]
    Length(u32),
}

impl Header {
    /// A header with no payload, flags or checksum: fill in what differs.
    #[must_use]
    pub const fn new(kind: Kind, dtype: DType, rank: Rank, epoch: Epoch) -> Header {
        Header {
            kind,
            flags: 0,
            dtype,
            rank,
            epoch,
            key: Key(0),
            round: Round(0),
            offset: 0,
            length: 0,
            contributors: 0,
            payload_checksum: 0,
            act: 0,
            missing: 0,
        }
    }

    /// As what the payload travels.
    ///
    /// # Panics
    /// The flags are of no form, which [`Header::decode`] lets none have.
    #[must_use]
    pub fn form(&self) -> Form {
        Form::of(self.flags).expect("flags are of one form")
    }

    /// The 64 bytes of this header.
    #[must_use]
    pub fn encode(&self) -> RawHeader {
        let mut raw = [0; HEADER_BYTES];
        raw[0..4].copy_from_slice(&MAGIC);
        raw[4] = VERSION;
        raw[5] = self.kind as u8;
        raw[6] = self.flags;
        raw[7] = self.dtype as u8;
        raw[8..12].copy_from_slice(&self.rank.0.to_le_bytes());
        raw[12..16].copy_from_slice(&self.epoch.0.to_le_bytes());
        raw[16..24].copy_from_slice(&self.key.0.to_le_bytes());
        raw[24..32].copy_from_slice(&self.round.0.to_le_bytes());
        raw[32..40].copy_from_slice(&self.offset.to_le_bytes());
        raw[40..44].copy_from_slice(&self.length.to_le_bytes());
        raw[44..48].copy_from_slice(&self.contributors.to_le_bytes());
        raw[48..52].copy_from_slice(&self.payload_checksum.to_le_bytes());
        let is_of_result =
            matches!(self.kind, Kind::Publication | Kind::GpuLanded | Kind::GpuGather)
                || self.flags & FLAG_RESULT != 0;
        let word = if is_of_result { self.missing } else { self.act };
        raw[52..60].copy_from_slice(&word.to_le_bytes());
        let checksum = crc32c(&raw[..60]);
        raw[60..64].copy_from_slice(&checksum.to_le_bytes());
        raw
    }

    /// The header in these bytes.
    ///
    /// # Errors
    /// The first field that is wrong. Nothing beyond the header itself is checked here: whether
    /// key, round, rank and length fit the registry is for the session.
    pub fn decode(raw: &RawHeader) -> Result<Header, Invalid> {
        let u32_at =
            |at: usize| u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if raw[0..4] != MAGIC {
            return Err(Invalid::Magic([raw[0], raw[1], raw[2], raw[3]]));
        }
        if raw[4] != VERSION {
            return Err(Invalid::Version(raw[4]));
        }
        let (found, computed) = (u32_at(60), crc32c(&raw[..60]));
        if found != computed {
            return Err(Invalid::Checksum { found, computed });
        }
        let kind = match raw[5] {
            1 => Kind::Contribution,
            2 => Kind::Publication,
            3 => Kind::Goodbye,
            4 => Kind::Refused,
            5 => Kind::Ready,
            6 => Kind::Grant,
            7 => Kind::GpuReady,
            8 => Kind::GpuReduce,
            9 => Kind::GpuLanded,
            10 => Kind::GpuGather,
            11 => Kind::GpuEnd,
            other => return Err(Invalid::Kind(other)),
        };
        let flags = raw[6];
        let mut known = FLAG_PAYLOAD_CHECKSUM;
        if kind == Kind::Contribution {
            known |= FLAG_SCALED | FLAG_RESULT;
        }
        if matches!(kind, Kind::Contribution | Kind::Publication) {
            known |= Form::MASK;
        }
        if flags & !known != 0 || Form::of(flags).is_none() {
            return Err(Invalid::Flags(flags));
        }
        let dtype = DType::from_wire(raw[7]).ok_or(Invalid::DType(raw[7]))?;
        let word = u64_at(52);
        let (act, missing) = match kind {
            Kind::Contribution if flags & FLAG_RESULT != 0 => (0, word),
            Kind::Contribution | Kind::Refused | Kind::Ready => (word, 0),
            Kind::Goodbye if word <= COMES_BACK => (word, 0),
            Kind::Publication | Kind::GpuLanded | Kind::GpuGather => (0, word),
            _ if word != 0 => return Err(Invalid::Reserved),
            _ => (0, 0),
        };
        if flags & FLAG_PAYLOAD_CHECKSUM == 0 && u32_at(48) != 0 {
            return Err(Invalid::Reserved);
        }
        let length = u32_at(40);
        if length as usize > PART_BYTES_MAX {
            return Err(Invalid::Length(length));
        }
        Ok(Header {
            kind,
            flags,
            dtype,
            rank: Rank(u32_at(8)),
            epoch: Epoch(u32_at(12)),
            key: Key(u64_at(16)),
            round: Round(u64_at(24)),
            offset: u64_at(32),
            length,
            contributors: u32_at(44),
            payload_checksum: u32_at(48),
            act,
            missing,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Header {
        Header {
            kind: Kind::Contribution,
            flags: FLAG_PAYLOAD_CHECKSUM,
            dtype: DType::BF16,
            rank: Rank(3),
            epoch: Epoch(1),
            key: Key(0x0102_0304_0506_0708),
            round: Round(812),
            offset: 4096,
            length: 1 << 20,
            contributors: 1,
            payload_checksum: 0xdead_beef,
            act: 0,
            missing: 0,
        }
    }

    #[test]
    fn golden_vector() {
        let hex: String = sample().encode().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            concat!(
                "42505331",
                "01",
                "01",
                "01",
                "0a",
                "03000000",
                "01000000",
                "0807060504030201",
                "2c03000000000000",
                "0010000000000000",
                "00001000",
                "01000000",
                "efbeadde",
                "0000000000000000",
                "3a2de46a"
            )
        );
    }

    #[test]
    fn a_payload_has_one_form_and_other_frames_have_none() {
        for form in Form::ALL {
            let header = Header { flags: form.flag() | FLAG_PAYLOAD_CHECKSUM, ..sample() };
            assert_eq!(Header::decode(&header.encode()).map(|header| header.form()), Ok(form));
            let word = Header { kind: Kind::Ready, length: 0, ..header };
            assert_eq!(Header::decode(&word.encode()).is_ok(), form == Form::Declared);
        }
        let both = Header { flags: Form::MASK, payload_checksum: 0, ..sample() };
        assert_eq!(Header::decode(&both.encode()), Err(Invalid::Flags(Form::MASK)));
    }

    #[test]
    fn a_result_lacks_ranks_and_a_contribution_has_an_act() {
        let result = Header { kind: Kind::Publication, missing: 1 << 63 | 5, ..sample() };
        assert_eq!(Header::decode(&result.encode()), Ok(result));
        let contribution = Header { act: 1 << 63 | 5, ..sample() };
        assert_eq!(Header::decode(&contribution.encode()), Ok(contribution));
        // Given back by who had it, it is still a result.
        let flags = FLAG_RESULT | FLAG_PAYLOAD_CHECKSUM;
        let given = Header { flags, missing: 1 << 63 | 5, ..sample() };
        assert_eq!(Header::decode(&given.encode()), Ok(given));
        let published = Header { kind: Kind::Publication, ..given };
        assert_eq!(Header::decode(&published.encode()), Err(Invalid::Flags(flags)));
        for kind in [Kind::GpuLanded, Kind::GpuGather] {
            let news = Header { kind, flags: 0, payload_checksum: 0, missing: 5, ..sample() };
            assert_eq!(Header::decode(&news.encode()), Ok(news));
        }
        let goodbye =
            Header { act: 2, ..Header::new(Kind::Goodbye, DType::F32, Rank(1), Epoch(1)) };
        assert_eq!(Header::decode(&goodbye.encode()), Err(Invalid::Reserved));
    }

    #[test]
    fn every_single_bit_error_is_caught() {
        let said = Header { act: 0x8123_4567_89ab_cdef, ..sample() };
        let raw = said.encode();
        assert_eq!(Header::decode(&raw), Ok(said));
        for bit in 0..HEADER_BYTES * 8 {
            let mut wrong = raw;
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&wrong).is_err(), "bit {bit} flipped and not noticed");
        }
    }

    #[test]
    fn an_act_is_of_frames_that_say_one() {
        for kind in [Kind::Goodbye, Kind::Grant, Kind::GpuReady] {
            let said = Header { kind, flags: 0, payload_checksum: 0, act: 2, ..sample() };
            assert_eq!(Header::decode(&said.encode()), Err(Invalid::Reserved), "{kind:?}");
        }
        for kind in [Kind::Contribution, Kind::Ready, Kind::Refused] {
            let said = Header { kind, flags: 0, payload_checksum: 0, act: 1, ..sample() };
            assert_eq!(Header::decode(&said.encode()), Ok(said));
        }
        let suspends =
            Header { act: COMES_BACK, ..Header::new(Kind::Goodbye, DType::U8, Rank(1), Epoch(1)) };
        assert_eq!(Header::decode(&suspends.encode()), Ok(suspends));
    }
}
