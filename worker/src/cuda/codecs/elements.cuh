// Codecs on the GPU: parts of tensors to fewer bytes, and back. `compile` makes PTX of blocks.cu and of whole.cu.
//
// The arithmetic is that of engine/src/encode, bit for bit (of 16-bit floats, a NaN is equal to
// any NaN): no operation is fused or reordered, which the flags of `compile` see to. That module says
// where each format comes from.
//
// Encoded bytes lie in pinned memory of the host, which kernels read and write over the bus: each
// byte once, in words that neighbouring threads have side by side. There is no header of CUDA's
// here, so that a compiler suffices which knows the instructions, and none of NVIDIA's is needed.
//
// This file has what all kernels share: words, elements of tensors as f32, random numbers, arguments,
// and the two kernels of what error feedback and momentum keep, which both files have.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static inline __attribute__((device, always_inline))
#define KERNEL extern "C" __attribute__((global))

#define WARP 32
#define ALL_LANES 0xffffffffu

#define MAGNITUDE 0x7fffffffu
#define INFINITY_BITS 0x7f800000u
#define NAN_BITS 0x7fc00000u
#define SMALLEST_NORMAL_BITS 0x00800000u

DEVICE u32 bits_of(float value) { return __builtin_bit_cast(u32, value); }
DEVICE float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }

DEVICE u32 thread() { return __nvvm_read_ptx_sreg_tid_x(); }
DEVICE u32 lane() { return thread() % WARP; }

DEVICE float finite_or_zero(float value) {
    return (bits_of(value) & MAGNITUDE) < INFINITY_BITS ? value : 0.0f;
}

// What is left of a value for which another was sent: `Rest` of engine/src/encode/fold.rs.
DEVICE float rest_of(float value, float decoded) { return finite_or_zero(value - decoded); }

DEVICE u32 largest_of_warp(u32 largest) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        u32 other = __nvvm_shfl_sync_bfly_i32(ALL_LANES, largest, distance, WARP - 1);
        if (other > largest) largest = other;
    }
    return largest;
}

// ---- Elements of tensors, as f32

struct F32 {
    typedef float Memory;
    DEVICE float load(float element) { return element; }
    DEVICE float store(float value) { return value; }
};

struct F16 {
    typedef u16 Memory;
    DEVICE float load(u16 element) {
        // The instruction makes one NaN of all; the processor's keeps what they carry.
        if ((element & 0x7fff) > 0x7c00) {
            return float_of((u32)(element & 0x8000) << 16 | NAN_BITS | (u32)(element & 0x3ff) << 13);
        }
        return (float)__builtin_bit_cast(_Float16, element);
    }
    DEVICE u16 store(float value) { return __builtin_bit_cast(u16, (_Float16)value); }
};

struct BF16 {
    typedef u16 Memory;
    DEVICE float load(u16 element) { return float_of((u32)element << 16); }
    DEVICE u16 store(float value) {
        u32 bits = bits_of(value);
        // A NaN whose upper half is 0 would be rounded to an infinity.
        if ((bits & MAGNITUDE) > INFINITY_BITS) return (u16)(bits >> 16 | 0x40);
        return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};

// Random numbers by position: `engine/src/encode/random.rs`.
struct Noise {
    u32 first, second;

    DEVICE u64 mix(u64 word) {
        word += 0x9e3779b97f4a7c15u;
        word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9u;
        word = (word ^ word >> 27) * 0x94d049bb133111ebu;
        return word ^ word >> 31;
    }

    DEVICE Noise of(u64 seed, u64 draw) {
        u64 word = mix(seed ^ mix(draw));
        return Noise{(u32)word, (u32)(word >> 32)};
    }

    DEVICE u32 at(Noise noise, u32 index) {
        u32 word = index ^ noise.first;
        word = (word ^ word >> 16) * 0x7feb352du;
        word = (word ^ word >> 15 ^ noise.second) * 0x846ca68bu;
        return word ^ word >> 16;
    }
};

// ---- What the host launches, by name
//
// All kernels of codecs take the same arguments, of which a codec uses those it has:
//
// - `elements` of a tensor at `tensor`, and their encoding at `wire`;
// - `option`: whether to round at random (fp8, int8), whether the scale is the mean magnitude (onebit), 1
//   if levels are natural, plus 2 if the norm is l2 (dithering);
// - `count`: elements that are sent (topk, randomk), or levels (dithering);
// - `seed` of the codec, and `draw` of the round: the sender's own, for randomk that of all.

#define ARGUMENTS u32 elements, void *tensor, void *wire, u32 option, u32 count, u64 seed, u64 draw

#define KERNELS(QUALIFIED, codec, element, ENCODE, DECODE)                                        \
    QUALIFIED void encode_##codec##_##element(ARGUMENTS) { ENCODE; }                              \
    QUALIFIED void decode_##codec##_##element(ARGUMENTS) { DECODE; }

// Encodes f32, and leaves in its place what was not sent.
#define KEEPER(QUALIFIED, codec, ENCODE)                                                          \
    QUALIFIED void encode_rest_##codec##_f32(ARGUMENTS) { ENCODE; }

#define EACH_ELEMENT(ALL) ALL(f32, F32) ALL(f16, F16) ALL(bf16, BF16)

// ---- What is kept between rounds: `Coded::encode` of worker/src/nic/coding.rs
//
// Before an encoding that keeps something, `values` become what is to be encoded, in f32: the
// elements of a tensor, with momentum if there is a `velocity`, and what earlier rounds have left
// in `values` if this `adds`.

DEVICE u32 place_in_grid() {
    return __nvvm_read_ptx_sreg_ctaid_x() * __nvvm_read_ptx_sreg_ntid_x() + thread();
}
DEVICE u32 size_of_grid() {
    return __nvvm_read_ptx_sreg_nctaid_x() * __nvvm_read_ptx_sreg_ntid_x();
}

template <class Element>
DEVICE void gather(
    u32 elements, const void *tensor, float *values, float *velocity, float factor, u32 adds) {
    const typename Element::Memory *from = (const typename Element::Memory *)tensor;
    for (u32 i = place_in_grid(); i < elements; i += size_of_grid()) {
        float given = Element::load(from[i]);
        float value = given;
        if (velocity) {
            float moved = factor * velocity[i] + value;
            value += factor * moved;
            velocity[i] = finite_or_zero(moved);
        }
        if (adds) value = values[i] + value;
        // An addition here makes one NaN of all; the processor's keeps what they carry.
        bool is_nan = (bits_of(given) & MAGNITUDE) > INFINITY_BITS;
        values[i] = is_nan ? float_of(bits_of(given) | NAN_BITS) : value;
    }
}

#define GATHER(element, Element)                                                                  \
    KERNEL void gather_##element(u32 elements, const void *tensor, float *values,                 \
                                 float *velocity, float factor, u32 adds) {                       \
        gather<Element>(elements, tensor, values, velocity, factor, adds);                        \
    }

EACH_ELEMENT(GATHER)

// What was left of the rounds before is worth more, or less.
KERNEL void scale(u32 elements, float *values, float factor) {
    for (u32 i = place_in_grid(); i < elements; i += size_of_grid()) values[i] *= factor;
}
