//! In which form a part goes to its server whose encoding leaves that to who sends it: the one that
//! takes the least time, of the bytes on the line and of what processors do to make them fewer.
//!
//! How fast the line is, the loop sees when results come: it takes them at once, so while one lands
//! the line is what is waited for. In the other direction it sees how long a frame waits that the
//! kernel does not take at once. The slower direction counts. How fast a codec is, is measured when
//! the first tensor is declared with it. What stays on this host is never encoded.
//!
//! Invariant: a part has one form from when it is queued to when its frame is sent. Plain is chosen
//! unless something else is known to be faster.

#![forbid(unsafe_code)]

use super::{LaneId, LanePeer, Nic, PartId, Stage};
use bps_engine::base::DType;
use bps_engine::config::AutoCompression;
use bps_engine::encode::{Codec, Draw, narrow, widen};
use bps_engine::proto::encoding::Encoding;
use bps_engine::wire::header::Form;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Rounds of a part after which its form is chosen again.
const ROUNDS: u64 = 16;
/// How much faster another form than plain must be to be taken instead of the one that is.
const GAIN: f64 = 1.2;
/// Bytes over which the line is measured, at least and at most; at most, because lanes that take
/// turns may always have something that lands.
const SPAN_BYTES: [u64; 2] = [256 << 10, 64 << 20];
/// How many such measurements there must be, and how many are kept.
const SPANS: [usize; 2] = [3, 9];
/// A frame that is sent within this time went into a buffer that had room, which says nothing of
/// the line; and a line that takes a part so fast need not be encoded for.
const AT_ONCE: Duration = Duration::from_micros(100);
/// Elements on which a codec is measured, and how often.
const ELEMENTS: usize = 64 << 10;
const TRIALS: usize = 3;

/// What was chosen for a part.
pub(super) struct Choice {
    pub(super) form: Form,
    /// In which round; 0 if nothing was known yet, none if it stays.
    since: Option<u64>,
}

/// How fast the line and codecs are.
#[derive(Default)]
pub(super) struct Costs {
    from_servers: Way,
    to_servers: Way,
    /// Seconds an element that is encoded and decoded takes.
    codecs: Vec<(Codec, DType, f64)>,
}

/// One direction of the line.
#[derive(Default)]
struct Way {
    /// Payloads that are under way, and since when that or the last look is.
    under_way: u32,
    since: Duration,
    busy: Duration,
    bytes: u64,
    /// Seconds a byte, the latest last.
    spans: VecDeque<f64>,
}

/// What a part of a tensor is, as far as time goes.
struct Size {
    encoding: Encoding,
    dtype: DType,
    elements: usize,
}

impl Size {
    fn wire_bytes(&self, form: Form) -> usize {
        let plain = self.elements * self.dtype.size();
        self.encoding.codec_of(form).map_or(plain, |codec| codec.wire_bytes_max(self.elements))
    }

    /// The forms that are of use, the longest first: each is shorter than the one before.
    fn forms(&self) -> impl Iterator<Item = Form> {
        let mut last = usize::MAX;
        [Form::Plain, Form::Half, Form::Declared].into_iter().filter(move |form| {
            let (bytes, before) = (self.wire_bytes(*form), last);
            last = last.min(bytes);
            bytes < before
        })
    }
}

impl Way {
    fn begins(&mut self, now: Duration) {
        if self.under_way == 0 {
            self.since = now;
        }
        self.under_way += 1;
    }

    /// One is over that does not count: if others wait, their time goes on.
    fn passes(&mut self) {
        // What was under way before the first part left its form to the loop was not counted: see
        // `Nic::costs_of`.
        self.under_way = self.under_way.saturating_sub(1);
    }

    fn ends(&mut self, now: Duration, bytes: usize) {
        // As there: nobody saw when it began.
        if self.under_way == 0 {
            return;
        }
        self.busy += now.saturating_sub(self.since);
        self.since = now;
        self.passes();
        self.bytes += bytes as u64;
        let least = SPAN_BYTES[usize::from(self.under_way > 0)];
        if self.bytes < least {
            return;
        }
        if self.spans.len() == SPANS[1] {
            self.spans.pop_front();
        }
        #[allow(clippy::cast_precision_loss, reason = "far below 2^53")]
        self.spans.push_back(self.busy.as_secs_f64() / self.bytes as f64);
        debug_assert!(self.spans.len() <= SPANS[1] && self.spans.back() >= Some(&0.0));
        (self.busy, self.bytes) = (Duration::ZERO, 0);
    }

    /// Seconds that a byte takes, once that is known: the median, so that a moment in which this
    /// process did something else does not count.
    fn seconds(&self) -> Option<f64> {
        if self.spans.len() < SPANS[0] {
            return None;
        }
        let mut sorted: Vec<f64> = self.spans.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        Some(sorted[sorted.len() / 2])
    }
}

impl Costs {
    /// Seconds that a byte takes in the slower direction, once the way from servers is known: that
    /// to them may take everything at once.
    fn line(&self) -> Option<f64> {
        let to = self.to_servers.seconds().unwrap_or(0.0);
        Some(self.from_servers.seconds()?.max(to))
    }

    /// Seconds that an element takes to be encoded and decoded.
    fn codec(&self, codec: Codec, dtype: DType) -> Option<f64> {
        let found = self.codecs.iter().find(|(of, from, _)| (*of, *from) == (codec, dtype));
        found.map(|(_, _, seconds)| *seconds)
    }

    fn measure(&mut self, codec: Codec, dtype: DType) {
        if self.codec(codec, dtype).is_none() {
            let seconds = seconds_of(codec, dtype);
            assert!(seconds.is_finite() && seconds >= 0.0, "the choice compares sums of such");
            self.codecs.push((codec, dtype, seconds));
        }
    }

    /// The form that takes the least time, if that is known; `share` is what servers do for each
    /// element, of what a worker does.
    fn best(&self, size: &Size, current: Form, share: f64) -> Option<Form> {
        let line = self.line()?;
        #[allow(clippy::cast_precision_loss, reason = "a part is far smaller")]
        let seconds = |form: Form| {
            let work = size.encoding.codec_of(form).map_or(Some(0.0), |codec| {
                let each = self.codec(codec, size.dtype)?;
                Some(each * size.elements as f64 * (1.0 + share))
            })?;
            let all = size.wire_bytes(form) as f64 * line + work;
            Some((if form == Form::Plain || form == current { all } else { all * GAIN }, form))
        };
        let best = size.forms().filter_map(seconds).min_by(|one, other| one.0.total_cmp(&other.0));
        best.map(|(_, form)| form)
    }
}

/// How long an element takes to be encoded and decoded here: the best of a few trials, of which the
/// first finds memory and processor cold.
fn seconds_of(codec: Codec, dtype: DType) -> f64 {
    let mut values: Vec<f32> = (0u16..=u16::MAX).map(|at| f32::from(at % 251) - 125.0).collect();
    values.resize(ELEMENTS, 1.0);
    let mut elements = vec![0; ELEMENTS * dtype.size()];
    narrow(dtype, &values, &mut elements);
    let mut wire = vec![0; codec.wire_bytes_max(ELEMENTS)];
    let random = Draw { shared: 1, own: 2 };
    let mut best = f64::INFINITY;
    for _ in 0..TRIALS {
        let began = Instant::now();
        widen(dtype, &elements, &mut values);
        let length = codec.encode(&values, random, &mut wire);
        codec.decode(&wire[..length], random, &mut values);
        narrow(dtype, &values, &mut elements);
        best = best.min(began.elapsed().as_secs_f64());
    }
    #[allow(clippy::cast_precision_loss, reason = "a small number")]
    let elements = ELEMENTS as f64;
    best / elements
}

impl Nic {
    /// With what a new part of this encoding begins, on its lane to a server.
    pub(super) fn first_choice(
        &mut self,
        encoding: Encoding,
        dtype: DType,
        elements: usize,
        lane: Option<LaneId>,
    ) -> Choice {
        if !encoding.auto {
            return Choice { form: Form::Declared, since: None };
        }
        let size = Size { encoding, dtype, elements };
        self.costs.get_or_insert_default();
        let most = match self.config.auto {
            AutoCompression::Measured => None,
            AutoCompression::None => Some(Form::Plain),
            AutoCompression::Bf16 => Some(Form::Half),
            AutoCompression::Codec => Some(Form::Declared),
        };
        if let Some(most) = most {
            let form = size.forms().take_while(|form| *form <= most).last();
            return Choice { form: form.unwrap_or(Form::Plain), since: None };
        }
        if lane.is_none_or(|lane| self.lane(lane).is_local) {
            return Choice { form: Form::Plain, since: None };
        }
        let costs = self.costs.get_or_insert_default();
        for form in size.forms() {
            if let Some(codec) = encoding.codec_of(form) {
                costs.measure(codec, dtype);
            }
        }
        Choice { form: Form::Plain, since: Some(0) }
    }

    /// Chooses the form of a part whose round is about to be queued, when it is time.
    pub(super) fn choose(&mut self, part: PartId) {
        let state = self.part(part);
        let Some(coded) = &state.coded else { return };
        let Choice { form, since: Some(since) } = coded.choice else { return };
        if since > 0 && state.round < since + ROUNDS {
            return;
        }
        let Some(costs) = &self.costs else { return };
        let size = Size {
            encoding: coded.encoding(),
            dtype: state.plan.dtype,
            elements: state.plan.bytes / state.plan.dtype.size(),
        };
        let cores =
            self.lanes.iter().filter(|lane| matches!(lane.peer, LanePeer::Server(_))).count();
        let in_group = self.group.lanes.len() + 1;
        let groups = (self.config.size as usize).div_ceil(in_group);
        // A server decodes what each group sends and encodes once, and all cores do so at once.
        #[allow(clippy::cast_precision_loss, reason = "small numbers")]
        let share = (groups + 1) as f64 / (2 * cores.max(1)) as f64;
        let Some(form) = costs.best(&size, form, share) else { return };
        let round = state.round;
        let state = self.part_mut(part);
        // What is queued, or posted, holds credit for the form that it had.
        assert!(state.stage == Stage::Pushed && state.posted == 0, "a part has one form a round");
        if let Some(coded) = &mut state.coded {
            coded.choice = Choice { form, since: Some(round) };
        }
    }

    /// A result begins to land on a lane.
    pub(super) fn landing_begins(&mut self, lane: LaneId) {
        let now = self.now;
        if let Some(costs) = self.costs_of(lane) {
            costs.from_servers.begins(now);
        }
    }

    /// Its lane was lost before it had landed.
    pub(super) fn landing_lost(&mut self, lane: LaneId) {
        if let Some(costs) = self.costs_of(lane) {
            costs.from_servers.passes();
        }
    }

    /// It has landed.
    pub(super) fn landing_ends(&mut self, lane: LaneId, bytes: usize) {
        let now = self.now;
        if let Some(costs) = self.costs_of(lane) {
            costs.from_servers.ends(now, bytes);
        }
    }

    /// A frame of a part was posted on a lane.
    pub(super) fn sending_begins(&mut self, lane: LaneId) {
        let now = self.now;
        if let Some(costs) = self.costs_of(lane) {
            costs.to_servers.begins(now);
        }
    }

    /// It was sent to a server.
    pub(super) fn sending_ends(&mut self, lane: LaneId, part: PartId) {
        if self.costs.is_none() {
            return;
        }
        let (now, state) = (self.now, self.part(part));
        let is_counted = now.saturating_sub(state.asked) >= AT_ONCE && !self.is_silent(state);
        let bytes = self.line_bytes(part);
        match self.costs_of(lane) {
            Some(costs) if is_counted => costs.to_servers.ends(now, bytes),
            Some(costs) => costs.to_servers.passes(),
            None => {}
        }
    }

    /// Where the time goes that payloads take on this lane, if some part leaves its form to that.
    fn costs_of(&mut self, lane: LaneId) -> Option<&mut Costs> {
        let crosses = self.costs.is_some() && self.crosses_line(lane);
        self.costs.as_deref_mut().filter(|_| crosses)
    }

    fn crosses_line(&self, lane: LaneId) -> bool {
        let lane = self.lane(lane);
        matches!(lane.peer, LanePeer::Server(_)) && !lane.is_local
    }

    /// How many parts go in each form of those that may be encoded or not: plain, as bf16, by their
    /// codec. And how many bytes a second the line moves, or 0. None where no part may be.
    pub(super) fn choices(&self) -> Option<([u64; 3], u64)> {
        let costs = self.costs.as_ref()?;
        let mut counts = [0; 3];
        let open = self.parts.iter().filter(|part| !part.abandoned);
        for coded in open.filter_map(|part| part.coded.as_ref()) {
            if coded.encoding().auto {
                counts[coded.choice.form as usize] += 1;
            }
        }
        let line = costs.line().filter(|line| *line > 0.0);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a speed")]
        Some((counts, line.map_or(0, |line| (1.0 / line) as u64)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(encoding: &str, dtype: DType) -> Size {
        Size { encoding: encoding.parse().expect("an encoding"), dtype, elements: 1 << 20 }
    }

    /// Codecs that take a nanosecond an element, on a line of so many bytes a second.
    fn costs(bytes_per_second: u64) -> Costs {
        let mut costs = Costs::default();
        for codec in ["bf16", "int8", "dithering(levels=7)"] {
            let each = if codec.starts_with("dith") { 4e-9 } else { 1e-9 };
            costs.codecs.push((codec.parse().expect("a codec"), DType::F32, each));
        }
        moves(&mut costs.from_servers, bytes_per_second);
        costs
    }

    /// Three rounds of two payloads each.
    fn moves(way: &mut Way, bytes_per_second: u64) {
        let mut now = Duration::ZERO;
        for _ in 0..SPANS[0] {
            way.begins(now);
            // Two at once share the line, and what lies between them is nobody's time.
            way.begins(now);
            now += Duration::from_nanos((2 << 20) * 1_000_000_000 / bytes_per_second);
            way.ends(now, 1 << 20);
            way.ends(now, 1 << 20);
            now += Duration::from_secs(5);
        }
    }

    #[test]
    fn the_slower_direction_counts() {
        let int8 = size("auto(int8)", DType::F32);
        let mut costs = costs(12_500_000_000);
        assert_eq!(costs.best(&int8, Form::Plain, 1.0), Some(Form::Plain));
        moves(&mut costs.to_servers, 12_500_000);
        assert_eq!(costs.best(&int8, Form::Plain, 1.0), Some(Form::Declared));
        // What is taken at once from then on changes nothing.
        for _ in 0..100 {
            costs.to_servers.begins(Duration::from_secs(60));
            costs.to_servers.passes();
        }
        assert_eq!(costs.best(&int8, Form::Declared, 1.0), Some(Form::Declared));
        // A line that has become fast in this direction, too.
        (0..3).for_each(|_| moves(&mut costs.to_servers, 12_500_000_000));
        assert_eq!(costs.best(&int8, Form::Declared, 1.0), Some(Form::Plain));
    }

    #[test]
    fn what_is_taken_at_once_stops_no_clock() {
        let mut way = Way::default();
        way.begins(Duration::ZERO);
        way.begins(Duration::ZERO);
        way.passes();
        way.ends(Duration::from_secs(1), 1 << 20);
        assert_eq!(way.spans, [1.0 / f64::from(1 << 20)]);
    }

    #[test]
    fn the_faster_the_line_the_less_is_encoded() {
        let cases = [
            (12_500_000, "auto(int8)", Form::Declared),
            (125_000_000, "auto(int8)", Form::Declared),
            (12_500_000_000, "auto(int8)", Form::Plain),
            (125_000_000, "auto(dithering(levels=7))", Form::Declared),
            (500_000_000, "auto(dithering(levels=7))", Form::Half),
            (12_500_000_000, "auto(dithering(levels=7))", Form::Plain),
        ];
        for (speed, encoding, wanted) in cases {
            let chosen = costs(speed).best(&size(encoding, DType::F32), Form::Plain, 1.0);
            assert_eq!(chosen, Some(wanted), "{encoding} at {speed} B/s");
        }
    }

    #[test]
    fn a_change_must_gain_and_plain_is_taken_as_soon_as_it_is_not_slower() {
        let int8 = size("auto(int8)", DType::F32);
        // An element takes 4 bytes or 1.03, and 2 ns more.
        let level =
            |speed| [Form::Plain, Form::Declared].map(|now| costs(speed).best(&int8, now, 1.0));
        assert_eq!(level(1_600_000_000), [Some(Form::Plain); 2]);
        assert_eq!(level(1_400_000_000), [Some(Form::Plain), Some(Form::Declared)]);
        assert_eq!(level(1_000_000_000), [Some(Form::Declared); 2]);
    }

    #[test]
    fn what_began_uncounted_measures_nothing() {
        let mut way = Way::default();
        way.ends(Duration::from_secs(60), 64 << 20);
        assert_eq!((way.busy, way.bytes, way.spans.len()), (Duration::ZERO, 0, 0));
        // One that is lost on its way does not keep the clock going either.
        way.begins(Duration::from_secs(61));
        way.passes();
        way.begins(Duration::from_secs(90));
        way.ends(Duration::from_secs(91), 1 << 10);
        assert_eq!((way.busy, way.bytes), (Duration::from_secs(1), 1 << 10));
    }

    #[test]
    fn nothing_is_chosen_before_the_line_is_known() {
        let mut costs = costs(12_500_000);
        costs.from_servers.spans.pop_back();
        assert_eq!(costs.best(&size("auto", DType::F32), Form::Plain, 1.0), None);
    }

    #[test]
    fn forms_that_are_no_shorter_are_not_for_choice() {
        let forms = |encoding, dtype| size(encoding, dtype).forms().collect::<Vec<Form>>();
        assert_eq!(forms("auto", DType::F32), [Form::Plain, Form::Half, Form::Declared]);
        assert_eq!(forms("auto(bf16)", DType::F32), [Form::Plain, Form::Half]);
        assert_eq!(forms("auto", DType::F16), [Form::Plain, Form::Declared]);
        assert_eq!(forms("auto(fp16)", DType::BF16), [Form::Plain]);
    }

    #[test]
    fn a_codec_takes_time() {
        let took = seconds_of("int8".parse().expect("a codec"), DType::F32);
        assert!(took > 0.0 && took < 1e-5, "{took} s an element");
    }
}
