//! Jobs whose tensors are encoded on their way: every result compared, bit for bit, with what the
//! codecs make of the contributions by the rules in `docs/compression.md`.

use bps_engine::base::{DType, Key, Operation};
use bps_engine::config::{AutoCompression, TcpDriver, TransportChoice};
use bps_engine::encode::{narrow, widen};
use bps_engine::proto::encoding::{Encoding, SERVER, draw};
use bps_engine::transport::sim::Random;
use bps_engine::wire::header::Form;
use bps_tests::job::{self, JobShape};
use bps_worker::{Declaration, Error, Members, PushPull, TensorId, Worker};
use std::time::Duration;

const LONG: Option<Duration> = Some(Duration::from_secs(60));
const ROUNDS: u64 = 4;
/// Elements: several blocks of 128, and a tail.
const COUNT: usize = 3000;

fn parsed(encoding: &str) -> Encoding {
    encoding.parse().expect("an encoding")
}

fn tensor(name: &str, dtype: DType, operation: Operation, encoding: &str) -> Declaration {
    Declaration {
        name: name.into(),
        dtype,
        shape: (COUNT as u64).into(),
        operation,
        device: false,
        members: Members::ALL,
        receiver: None,
        encoding: Some(parsed(encoding)),
        store: None,
    }
}

/// A gradient: numbers of several magnitudes, some of them zero.
fn gradient(tensor: usize, rank: u32, round: u64) -> Vec<f32> {
    let mut random = Random::new(tensor as u64 * 1000 + u64::from(rank) * 100 + round);
    let mut one = || match random.below(8) {
        0 => 0.0,
        scale => {
            let exponent = i32::try_from(scale).expect("below 8") - 6;
            (random.below(2001) as f32 - 1000.0) / 1000.0 * 4f32.powi(exponent)
        }
    };
    (0..COUNT).map(|_| one()).collect()
}

/// The same as elements of a type.
fn bytes_of(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * dtype.size()];
    narrow(dtype, values, &mut bytes);
    bytes
}

fn values_of(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / dtype.size()];
    widen(dtype, bytes, &mut values);
    values
}

/// Pushes values and returns the result, as bytes.
fn push(worker: &Worker, tensor: TensorId, dtype: DType, values: &[f32]) -> Result<Vec<u8>, Error> {
    let mut bytes = bytes_of(dtype, values);
    let target = bytes.as_mut_ptr();
    let item = PushPull { tensor, source: target.cast_const(), target, priority: 0 };
    // SAFETY: the bytes stay until the handle is done: a wait that fails has ended as well.
    let handles = unsafe { worker.push_pull(&[item]) }?;
    assert!(handles[0].wait(LONG)?, "a round hangs");
    Ok(bytes)
}

/// One end of the way of a tensor, which encodes: a group of ranks, or the server.
struct End {
    encoding: Encoding,
    key: Key,
    sender: u32,
    residue: Vec<f32>,
    velocity: Vec<f32>,
}

impl End {
    fn new(encoding: Encoding, key: Key, sender: u32) -> End {
        let zeros = vec![0.0; COUNT];
        // A server has no momentum.
        let momentum = encoding.momentum.filter(|_| sender != SERVER);
        let encoding = Encoding { momentum, ..encoding };
        End { encoding, key, sender, residue: zeros.clone(), velocity: zeros }
    }

    /// What the other ends see of these values.
    fn sent(&mut self, round: u64, mut values: Vec<f32>) -> Vec<f32> {
        if let Some(momentum) = self.encoding.momentum {
            let factor = momentum.factor();
            for (value, velocity) in values.iter_mut().zip(&mut self.velocity) {
                *velocity = factor * *velocity + *value;
                *value += factor * *velocity;
            }
        }
        if self.encoding.feedback {
            for (value, kept) in values.iter_mut().zip(&self.residue) {
                *value += kept;
            }
        }
        let (codec, random) = (self.encoding.codec, draw(self.key, round, self.sender));
        let mut wire = vec![0; codec.wire_bytes_max(values.len())];
        let length = codec.encode(&values, random, &mut wire);
        let mut seen = vec![0.0; values.len()];
        codec.decode(&wire[..length], random, &mut seen);
        for ((kept, value), seen) in self.residue.iter_mut().zip(&values).zip(&seen) {
            *kept = value - seen;
        }
        seen
    }
}

/// What every rank is to get of these rounds, from ranks in these groups: at most two, so that the
/// order of additions makes no difference.
fn expected(
    (number, said): (usize, &Declaration),
    groups: &[&[u32]],
    round_count: u64,
) -> Vec<Vec<u8>> {
    let Declaration { dtype, operation, encoding, .. } = said;
    let encoding = encoding.expect("it is encoded");
    let key = Key(number as u64);
    let mut ends: Vec<End> = groups.iter().map(|group| End::new(encoding, key, group[0])).collect();
    let mut server = End::new(encoding, key, SERVER);
    let ranks: usize = groups.iter().map(|group| group.len()).sum();
    (1..=round_count)
        .map(|round| {
            let mut sum = vec![0.0; COUNT];
            for (group, end) in groups.iter().zip(&mut ends) {
                let mut contribution = vec![0.0; COUNT];
                for &rank in *group {
                    let pushed = bytes_of(*dtype, &gradient(number, rank, round));
                    for (all, one) in contribution.iter_mut().zip(values_of(*dtype, &pushed)) {
                        *all += one;
                    }
                }
                for (all, one) in sum.iter_mut().zip(end.sent(round, contribution)) {
                    *all += one;
                }
            }
            if *operation == Operation::Average {
                sum.iter_mut().for_each(|value| *value /= ranks as f32);
            }
            bytes_of(*dtype, &server.sent(round, sum))
        })
        .collect()
}

/// What a sum becomes of contributions of these forms: those of each rank, and its result in the
/// shortest of them.
fn chosen(number: usize, said: &Declaration, forms: &[Form], round: u64) -> Vec<u8> {
    let (encoding, key) = (said.encoding.expect("it is encoded"), Key(number as u64));
    let sent = |form: Form, sender: u32, values: Vec<f32>| match encoding.codec_of(form) {
        Some(codec) => End::new(Encoding::plain(codec), key, sender).sent(round, values),
        None => values,
    };
    let mut sum = vec![0.0; COUNT];
    for (rank, form) in (0..).zip(forms) {
        let pushed = bytes_of(said.dtype, &gradient(number, rank, round));
        let values = sent(*form, rank, values_of(said.dtype, &pushed));
        sum.iter_mut().zip(values).for_each(|(all, one)| *all += one);
    }
    if said.operation == Operation::Average {
        sum.iter_mut().for_each(|value| *value /= forms.len() as f32);
    }
    let shortest = *forms.iter().max().expect("there are ranks");
    bytes_of(said.dtype, &sent(shortest, SERVER, sum))
}

const CODECS: &[&str] = &[
    "fp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "onebit",
    "onebit(scaling)",
    "topk(k=0.02)",
    "topk(k=5)",
    "randomk(k=0.02, seed=7)",
];
/// Those that draw random numbers of their own.
const RANDOM: &[&str] = &[
    "fp8_e4m3(stochastic)",
    "fp8_e5m2(stochastic)",
    "int8(stochastic)",
    "dithering(levels=4)",
    "dithering(levels=6, natural, l2, seed=3)",
];

fn check(shape: JobShape, groups: &'static [&'static [u32]], tensors: Vec<Declaration>) {
    let wanted: Vec<Vec<Vec<u8>>> =
        tensors.iter().enumerate().map(|said| expected(said, groups, ROUNDS)).collect();
    job::run(shape, move |worker| {
        let ids = worker.declare(&tensors).expect("declared");
        for round in 1..=ROUNDS {
            for (number, said) in tensors.iter().enumerate() {
                let values = gradient(number, worker.rank(), round);
                let got = push(worker, ids[number], said.dtype, &values).expect("a sum");
                let wanted = &wanted[number][usize::try_from(round).expect("few") - 1];
                let (got, wanted) = (values_of(said.dtype, &got), values_of(said.dtype, wanted));
                let other = got.iter().zip(&wanted).position(|(one, other)| one != other);
                let pair = other.map(|at| (at, got[at], wanted[at]));
                assert_eq!(pair, None, "{}, round {round}, rank {}", said.name, worker.rank());
            }
        }
    });
}

#[test]
fn results_are_what_the_codecs_make_of_the_contributions() {
    let mut tensors = Vec::new();
    for codec in CODECS.iter().chain(RANDOM) {
        for extra in ["", "+feedback", "+feedback+momentum(0.9)"] {
            for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
                let operation =
                    if tensors.len() % 2 == 0 { Operation::Sum } else { Operation::Average };
                let encoding = format!("{codec}{extra}");
                let name = format!("{encoding} of {dtype} ({operation})");
                tensors.push(tensor(&name, dtype, operation, &encoding));
            }
        }
    }
    for (transport, driver) in [
        (TransportChoice::Tcp, TcpDriver::Uring),
        (TransportChoice::Tcp, TcpDriver::Poll),
        (TransportChoice::Shm, TcpDriver::Auto),
    ] {
        let shape = JobShape { transport, driver, ..JobShape::default() };
        check(shape, &[&[0], &[1]], tensors.clone());
    }
}

#[test]
fn what_a_host_has_added_is_encoded_once() {
    let operations = [Operation::Sum, Operation::Average];
    let tensors = CODECS.iter().zip(operations.into_iter().cycle()).map(|(codec, operation)| {
        tensor(codec, DType::F32, operation, &format!("{codec}+feedback"))
    });
    let shape = JobShape {
        workers: 3,
        transport: TransportChoice::Auto,
        hosts: &[2, 1],
        ..JobShape::default()
    };
    // One part, of which either rank of the host may be the owner: no codec here asks who it is.
    check(shape, &[&[0, 1], &[2]], tensors.collect());
}

#[test]
fn all_ranks_have_the_same_bits_however_many_they_are() {
    let shape = JobShape { workers: 4, servers: 2, partition_bytes: 4096, ..JobShape::default() };
    let tensors: Vec<Declaration> = CODECS
        .iter()
        .chain(RANDOM)
        .map(|codec| tensor(codec, DType::F32, Operation::Average, codec))
        .collect();
    let names: Vec<String> = tensors.iter().map(|said| said.name.clone()).collect();
    let seen = job::run(shape, move |worker| {
        let ids = worker.declare(&tensors).expect("declared");
        let sum = |number: usize| {
            let values = gradient(number, worker.rank(), 1);
            push(worker, ids[number], DType::F32, &values).expect("a sum")
        };
        (0..tensors.len()).map(sum).collect::<Vec<Vec<u8>>>()
    });
    for (number, name) in names.iter().enumerate() {
        assert!(seen.iter().all(|rank| rank[number] == seen[0][number]), "{name}: ranks differ");
    }
}

#[test]
fn each_rank_may_choose_for_itself_and_all_get_the_same() {
    use AutoCompression::{Bf16, Codec, Measured, None};
    const PAIRS: [[AutoCompression; 2]; 7] = [
        [None, None],
        [None, Codec],
        [Codec, Bf16],
        [Bf16, None],
        [Bf16, Bf16],
        [Codec, Codec],
        [Measured, Measured],
    ];
    let form = |one: &AutoCompression, dtype: DType| match one {
        Codec => Form::Declared,
        // It makes nothing of halves shorter.
        Bf16 if dtype == DType::F32 => Form::Half,
        // What stays on a host is not encoded.
        None | Bf16 | Measured => Form::Plain,
    };
    let kinds = [
        (DType::F32, Operation::Sum),
        (DType::F32, Operation::Average),
        (DType::F16, Operation::Average),
        (DType::BF16, Operation::Sum),
    ];
    let tensors: Vec<Declaration> = ["auto", "auto(dithering(levels=4))"]
        .into_iter()
        .flat_map(|auto| kinds.map(|(dtype, operation)| (auto, dtype, operation)))
        .map(|(auto, dtype, of)| tensor(&format!("{auto}, {of} of {dtype}"), dtype, of, auto))
        .collect();
    let transports = [
        (TransportChoice::Tcp, TcpDriver::Uring),
        (TransportChoice::Tcp, TcpDriver::Poll),
        (TransportChoice::Shm, TcpDriver::Auto),
    ];
    for (pair, (transport, driver)) in PAIRS.iter().zip(transports.into_iter().cycle()) {
        let shape = JobShape { transport, driver, auto: pair, ..JobShape::default() };
        let tensors = tensors.clone();
        job::run(shape, move |worker| {
            let ids = worker.declare(&tensors).expect("declared");
            for (number, said) in tensors.iter().enumerate() {
                let forms = pair.each_ref().map(|one| form(one, said.dtype));
                for round in 1..=ROUNDS {
                    let values = gradient(number, worker.rank(), round);
                    let got = push(worker, ids[number], said.dtype, &values).expect("a sum");
                    let wanted = chosen(number, said, &forms, round);
                    let (got, wanted) =
                        [got, wanted].map(|bytes| values_of(said.dtype, &bytes)).into();
                    let other = got.iter().zip(&wanted).position(|(one, other)| one != other);
                    assert_eq!(other, Option::None, "{}, {pair:?}, round {round}", said.name);
                }
            }
        });
    }
}

#[test]
fn a_group_may_choose_too_and_doubles_are_left_alone() {
    let auto = &[AutoCompression::Codec, AutoCompression::Codec, AutoCompression::None];
    let (transport, hosts) = (TransportChoice::Auto, &[2, 1]);
    let shape = JobShape { workers: 3, transport, hosts, auto, ..JobShape::default() };
    let seen = job::run(shape, |worker| {
        let said = [
            tensor("halves", DType::F16, Operation::Average, "auto"),
            tensor("doubles", DType::F64, Operation::Sum, "auto"),
        ];
        let ids = worker.declare(&said).expect("declared");
        let own = gradient(1, worker.rank(), 1);
        [0, 1].map(|at| push(worker, ids[at], said[at].dtype, &own).expect("a sum"))
    });
    assert!(seen.iter().all(|rank| *rank == seen[0]), "ranks differ");
    let mut sums = vec![0.0; COUNT];
    for rank in 0..3 {
        sums.iter_mut().zip(gradient(1, rank, 1)).for_each(|(all, one)| *all += f64::from(one));
    }
    let doubles = seen[0][1].chunks_exact(8).map(|one| f64::from_le_bytes(one.try_into().unwrap()));
    for (got, wanted) in doubles.zip(&sums) {
        assert!((got - wanted).abs() <= 1e-12 * wanted.abs(), "{got} is not {wanted}");
    }
    // An eight-bit code of a block's largest, and the rounding of halves.
    for (got, sum) in values_of(DType::F16, &seen[0][0]).iter().zip(&sums) {
        assert!((f64::from(*got) - sum / 3.0).abs() < 0.5, "{got} is not {sum} / 3");
    }
}

/// What a job of one tensor says, which each rank declares by itself.
fn declared(
    shape: JobShape,
    said: impl Fn(u32) -> Declaration + Clone + Send + 'static,
) -> Vec<String> {
    job::run(shape, move |worker| match worker.declare(&[said(worker.rank())]) {
        Ok(_) => "declared".to_owned(),
        Err(error) => error.to_string(),
    })
}

#[test]
fn ranks_that_disagree_about_an_encoding_are_told() {
    let said = |rank: u32| {
        let encoding = ["int8", "auto"][rank as usize];
        tensor("x", DType::F32, Operation::Sum, encoding)
    };
    let texts = declared(JobShape::default(), said);
    // Whoever was first heard of no other.
    let told = texts.iter().filter(|text| *text != "declared");
    assert!(told.clone().count() >= 1, "{texts:?}");
    for text in told {
        for part in ["tensor `x`", "encoded as auto(int8)", "encoded as int8"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}

#[test]
fn what_cannot_be_encoded_is_refused_with_the_reason() {
    for (dtype, operation, why) in [
        (DType::I32, Operation::Sum, "it is of i32, and floats alone are encoded"),
        (DType::F32, Operation::Max, "it is for max, and sums and averages alone are encoded"),
    ] {
        let said = move |_| tensor("x", dtype, operation, "bf16");
        for text in declared(JobShape::default(), said) {
            let start = "tensor `x` cannot be encoded as bf16: ";
            assert!(text.contains(&format!("{start}{why}")), "{text}");
        }
    }
}

#[test]
fn small_tensors_are_sent_as_they_are() {
    let shape = JobShape { min_compress_bytes: 1 << 20, ..JobShape::default() };
    let exact = job::run(shape, |worker| {
        let said = tensor("x", DType::F32, Operation::Sum, "bf16");
        let ids = worker.declare(std::slice::from_ref(&said)).expect("declared");
        let values: Vec<f32> = (0..COUNT).map(|at| 1.0 + at as f32 / 65536.0).collect();
        let got = push(worker, ids[0], DType::F32, &values).expect("a sum");
        let doubled: Vec<f32> = values.iter().map(|value| 2.0 * value).collect();
        // Declared again with the encoding, and pushed: it is the same tensor.
        let again = worker.declare(&[said]).expect("declared");
        (values_of(DType::F32, &got) == doubled, again == ids)
    });
    assert_eq!(exact, [(true, true), (true, true)]);
}

#[test]
fn an_overflow_is_seen_once_and_not_kept() {
    let shape = JobShape::default();
    let seen = job::run(shape, |worker| {
        let said = tensor("x", DType::F32, Operation::Sum, "int8+feedback+momentum(0.9)");
        let ids = worker.declare(std::slice::from_ref(&said)).expect("declared");
        let mut is_finite = Vec::new();
        for round in 1..=3 {
            let mut values = gradient(0, worker.rank(), round);
            if round == 1 {
                values[7] = f32::INFINITY;
            }
            let got = push(worker, ids[0], DType::F32, &values).expect("a sum");
            let all = values_of(DType::F32, &got);
            is_finite.push(all.iter().all(|value| value.is_finite()));
        }
        is_finite
    });
    assert_eq!(seen, [[false, true, true], [false, true, true]]);
}
