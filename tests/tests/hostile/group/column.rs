//! A NIC loop that sums a part of a tensor on GPUs with the rank that holds the same share below
//! another PCIe switch: what both say, which slots come back when, and what a bad one can't do.

use super::{
    BAD, BYTES, Command, FromGpu, GpuInbox, Header, Kind, Mpsc, ON_GPUS, Pair, Round, ToGpu,
};
use super::{DType, EPOCH, honest, pipeline, with_column};
use bps_engine::proto::messages::{Declaration, Frameworks, Mismatch};
use bps_worker::Error;
use bps_worker::Members;
use bps_worker::rounds::PartOf;
use bps_worker::rounds::handover::From;
use bps_worker::rounds::{Pool, Slot};

/// The good rank with the first round of its own part and of the bad one's open, each in a slot.
struct Column {
    pair: Pair,
    inbox: GpuInbox,
    outbox: Mpsc<FromGpu>,
    /// Numbers of slots that were given back to send from.
    back: Vec<u32>,
    /// Slots in which results have landed, with their bytes.
    landed: Vec<(Slot, Vec<u8>)>,
    /// Tensors whose part is over.
    over: Vec<u32>,
}

/// What the good rank contributes: halves, as the bad one's ones are.
const OWN_BYTE: u8 = 1;
/// Tensors of the good rank's part and of the bad one's.
const TENSORS: [u32; 2] = [2, 3];
const SENDS: [u32; 2] = [0, 1];
const LANDS: u32 = 2;

impl Column {
    fn new(seed: u64) -> Column {
        let pair = with_column(seed, vec![BAD]);
        let to = pipeline(64);
        let (inbox, outbox) = (to.inbox.clone(), to.outbox.clone());
        assert!(pair.commands.push(Command::OpenGpu(to)).is_ok());
        let (back, landed, over) = (Vec::new(), Vec::new(), Vec::new());
        let mut column = Column { pair, inbox, outbox, back, landed, over };
        let slot = column.slot(LANDS, Pool::Publications);
        column.say(FromGpu::Land(slot));
        column.settle();
        column
    }

    fn slot(&mut self, number: u32, pool: Pool) -> Slot {
        let mut memory = vec![OWN_BYTE; BYTES];
        let at = memory.as_mut_ptr();
        self.pair.memory.push(memory);
        // SAFETY: the pair keeps the memory, which is this slot's alone.
        unsafe { Slot::new(number, pool, (at, BYTES), false) }
    }

    fn command(&mut self, command: Command) {
        assert!(self.pair.commands.push(command).is_ok(), "a short queue");
    }

    fn say(&mut self, message: FromGpu) {
        assert!(self.outbox.push(message).is_ok(), "a short queue");
    }

    /// The part of this tensor is in its slot.
    fn push(&mut self, index: usize) {
        let slot = Some(self.slot(SENDS[index], Pool::Sends));
        let of = PartOf { tensor: TENSORS[index], index: 0 };
        let from = slot.map_or(From::Nowhere, From::Slot);
        self.say(FromGpu::Part { of, round: 1, priority: 0, from, encoded: None });
        self.settle();
    }

    fn send(&mut self, kind: Kind) {
        let of_own = matches!(kind, Kind::Ready | Kind::Contribution);
        self.pair.send(Header { key: ON_GPUS[usize::from(!of_own)], ..honest(kind) });
        self.settle();
    }

    fn settle(&mut self) {
        self.pair.settle();
        while let Some(message) = self.inbox.pop() {
            match message {
                ToGpu::Sent(slot) => self.back.push(slot.number()),
                ToGpu::Landed { of, slot: Some(slot), over, .. } => {
                    // SAFETY: the slot is of that size, and nobody writes to it before it is given
                    // back.
                    let bytes = unsafe { std::slice::from_raw_parts(slot.at(), BYTES) };
                    self.landed.push((slot, bytes.to_vec()));
                    self.over.extend(over.then_some(of.tensor));
                }
                ToGpu::Over(of) => self.over.push(of.tensor),
                ToGpu::Plan { .. } | ToGpu::Poisoned { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// The GPU has copied all results.
    fn has_copied(&mut self) {
        for (slot, _) in std::mem::take(&mut self.landed) {
            self.say(FromGpu::Land(slot));
        }
        self.settle();
    }

    fn heard(&self) -> Vec<Kind> {
        self.pair
            .heard
            .iter()
            .filter(|one| ON_GPUS.contains(&one.key))
            .map(|one| one.kind)
            .collect()
    }
}

/// One step of a round of both parts, in an order in which they may come.
type Step = fn(&mut Column);

const STEPS: [Step; 7] = [
    |column| column.push(0),
    |column| column.send(Kind::Ready),
    |column| column.send(Kind::Contribution),
    |column| column.push(1),
    |column| column.send(Kind::Grant),
    |column| column.send(Kind::Publication),
    Column::has_copied,
];

#[test]
fn shares_are_summed_in_the_slot_and_slots_come_back_once() {
    for seed in 1..=8 {
        let mut column = Column::new(seed);
        for (at, step) in STEPS.iter().enumerate() {
            step(&mut column);
            // Not before the GPU has the sum, although the other rank has it.
            assert!(at == 6 || !column.back.contains(&SENDS[0]), "step {at}: {:?}", column.back);
            if at == 2 {
                let number = |byte| f32::from_le_bytes([byte; 4]);
                let sum = (number(OWN_BYTE) + number(1)).to_le_bytes();
                assert!(column.landed[0].1.chunks(4).all(|bytes| bytes == sum));
                assert!(column.pair.payload.chunks(4).all(|bytes| bytes == sum));
            }
            if at == 5 {
                assert_eq!(column.landed[1].0.number(), LANDS);
                assert_eq!(column.landed[1].1, vec![1; BYTES]);
            }
        }
        let said = [Kind::Grant, Kind::Publication, Kind::Ready, Kind::Contribution];
        assert_eq!(column.heard(), said);
        column.back.sort_unstable();
        assert_eq!((&column.back[..], &column.over[..]), (&SENDS[..], &TENSORS[..]));
        assert_eq!(column.pair.over, None);
    }
}

/// Both tensors are given up after so many steps, which happens on both ranks.
fn poisoned(steps: usize, seed: u64) {
    let mut column = Column::new(seed);
    for step in &STEPS[..steps] {
        step(&mut column);
    }
    let said = |device| Declaration { device, ..declaration() };
    for tensor in TENSORS {
        let mismatch = Mismatch {
            first: super::GOOD,
            first_said: Box::new(said(true)),
            second: BAD,
            second_said: Box::new(said(false)),
            frameworks: Frameworks::default(),
            agreed: Vec::new(),
        };
        let name = format!("tensor {tensor}");
        let error = Error::Mismatch(std::sync::Arc::new(mismatch));
        column.command(Command::Poison { name, agreed: vec![(tensor, 0)], error });
    }
    column.settle();
    // What comes later of them goes back at once, and what was on its way harms nobody.
    for (index, pushed_by) in [(0, 1), (1, 4)] {
        if steps < pushed_by {
            column.push(index);
        }
    }
    if steps == 2 {
        column.send(Kind::Contribution);
    }
    if steps == 5 {
        column.send(Kind::Publication);
    }
    column.has_copied();
    column.back.sort_unstable();
    assert_eq!(column.back, SENDS, "after {steps} steps");
    assert_eq!(column.pair.over, None, "after {steps} steps");
    assert!(column.pair.bad.is_some(), "the lane is open");
}

fn declaration() -> Declaration {
    let operation = bps_engine::base::Operation::Sum;
    let (name, shape) = ("t".into(), 1.into());
    Declaration {
        name,
        dtype: DType::F32,
        shape,
        operation,
        device: true,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    }
}

#[test]
fn slots_of_what_is_given_up_come_back_once_wherever_it_was() {
    for steps in 0..=STEPS.len() {
        for seed in 1..=8 {
            poisoned(steps, seed);
        }
    }
}

#[test]
fn a_part_that_is_in_no_slot_is_neither_asked_for_nor_published() {
    for kind in [Kind::Grant, Kind::Publication, Kind::Contribution] {
        let mut column = Column::new(3);
        column.send(kind);
        let text = column.pair.end().to_string();
        assert!(
            text.starts_with("rank 1 (host here, pid 4711) sent what can't be right"),
            "{text}"
        );
    }
    // A word of another epoch, or of a round that is not open, is none of the column's either.
    for spoil in [(EPOCH.0 + 1, 1), (EPOCH.0, 2)] {
        let mut column = Column::new(4);
        let header = Header { key: ON_GPUS[0], ..honest(Kind::Ready) };
        let epoch = bps_engine::base::Epoch(spoil.0);
        column.pair.send(Header { epoch, round: Round(spoil.1), ..header });
        column.pair.settle();
        let text = column.pair.end().to_string();
        assert!(
            text.starts_with("rank 1 (host here, pid 4711) sent what can't be right"),
            "{text}"
        );
    }
}
