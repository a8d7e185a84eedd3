//! The tensors of a simulated job: random ones, and declarations that contradict them.

use bps_engine::base::{DType, Operation, Rank};
use bps_engine::proto::encoding::Encoding;
use bps_engine::proto::messages::Declaration;
use bps_engine::transport::sim::Random;
use bps_worker::Members;

/// A tensor, and how often it is pushed.
pub(super) struct Tensor {
    pub(super) declaration: Declaration,
    pub(super) rounds: u64,
}

/// Some tensors for so many ranks; on GPUs only where there are devices.
pub(super) fn tensors(random: &mut Random, workers: u32, devices: bool) -> Vec<Tensor> {
    let number = 1 + random.index(8);
    let one = |index: usize| {
        let dtype = DType::ALL[random.index(DType::ALL.len())];
        let device = devices && !random.once_in(4);
        // One on GPUs is for all.
        let members =
            if !device && random.once_in(2) { set(random, workers) } else { Members::ALL };
        let operation = match random.below(6) {
            0 => Operation::Sum,
            1 => Operation::Average,
            2 => Operation::Min,
            3 => Operation::Max,
            // Rounding makes a product of floats depend on the order.
            4 if !dtype.is_float() => Operation::Product,
            4 => Operation::Max,
            _ => Operation::Broadcast(member(random, &members, workers)),
        };
        let count = match random.below(6) {
            0 => 0,
            1 => 1,
            2 => 255,
            3 => random.below(5000),
            4 => random.below(20_000),
            _ => 1024 << random.below(5),
        };
        let name = format!("tensor.{index}");
        let rounds = 1 + random.below(3);
        // An average of whole numbers goes through memory of the host.
        let operation = match operation {
            Operation::Average if device && !dtype.is_float() => Operation::Sum,
            operation => operation,
        };
        let shape = count.into();
        let encoding = encoding(random, dtype, operation);
        let is_broadcast = matches!(operation, Operation::Broadcast(_));
        let may_have = !device && !is_broadcast && encoding.is_none();
        let receiver = (may_have && random.once_in(3)).then(|| member(random, &members, workers));
        Tensor {
            declaration: Declaration {
                name,
                dtype,
                shape,
                operation,
                device,
                members,
                receiver,
                encoding,
                store: None,
            },
            rounds,
        }
    };
    (0..number).map(one).collect()
}

/// Perhaps an encoding, if there is one that loses nothing of such results. Whole numbers as small
/// as these are the same in every type.
fn encoding(random: &mut Random, dtype: DType, operation: Operation) -> Option<Encoding> {
    let all: &[&str] = match (dtype, operation) {
        (DType::F64, Operation::Sum) => &["bf16", "fp16+feedback", "topk(k=1000000)"],
        (dtype, Operation::Sum) if dtype.is_float() => &[
            "auto(fp16)",
            "fp16+feedback",
            "topk(k=1000000)",
            "randomk(k=1000000, seed=1)+feedback",
        ],
        (DType::F32, Operation::Average) => &["topk(k=1000000)"],
        _ => return None,
    };
    let text = all[random.index(all.len())];
    random.once_in(2).then(|| text.parse().expect("an encoding"))
}

/// One of these.
fn member(random: &mut Random, members: &Members, workers: u32) -> Rank {
    let place = random.index(members.count(workers) as usize);
    members.iter(workers).nth(place).expect("it has so many")
}

/// Some ranks of so many: one at least, and perhaps all.
pub(super) fn set(random: &mut Random, workers: u32) -> Members {
    let mut ranks: Vec<u32> = (0..workers).collect();
    shuffle(random, &mut ranks);
    ranks.truncate(1 + random.index(ranks.len()));
    Members::new(ranks.into_iter().map(Rank).collect()).expect("each rank is there once")
}

/// Puts these into another order.
pub(super) fn shuffle<T>(random: &mut Random, items: &mut [T]) {
    for index in (1..items.len()).rev() {
        items.swap(index, random.index(index + 1));
    }
}

/// Another shape, another place, another receiver or other ranks.
pub(super) fn contradict(said: &Declaration, has_gpu: bool) -> Declaration {
    let count = said.shape.count();
    if !said.device && count % 4 < 2 {
        // Another one too, or its rounds would be over without anybody.
        let other = match said.operation {
            Operation::Broadcast(root) if root != Rank(1) => root,
            _ => Rank(0),
        };
        let members = Members::new(vec![Rank(1), other]);
        let members = members.expect("a set");
        return Declaration { members, receiver: None, ..said.clone() };
    }
    if let Some(receiver) = said.receiver {
        let receiver = Some(receiver).filter(|receiver| *receiver != Rank(1)).map(|_| Rank(1));
        return Declaration { receiver, ..said.clone() };
    }
    let may_move = said.dtype.is_float() || said.operation != Operation::Average;
    match has_gpu && may_move && count.is_multiple_of(2) {
        true => Declaration { device: !said.device, ..said.clone() },
        false => Declaration { shape: (count + 1).into(), ..said.clone() },
    }
}
