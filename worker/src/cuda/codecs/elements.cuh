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
// This file has what all kernels share: words, elements of tensors as f32, random numbers, arguments.

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
// All kernels take the same arguments, of which a codec uses those it has:
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

#define EACH_ELEMENT(ALL) ALL(f32, F32) ALL(f16, F16) ALL(bf16, BF16)
