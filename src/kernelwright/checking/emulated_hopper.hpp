// What ops/fp8_attention/hopper.cuh has, for g++: emulator.py takes this in its place. Copies arrive
// at once, and products are made where they are started; so a missing wait stays unseen.
static unsigned char* dynamic_shared() {
  alignas(128) static unsigned char memory[1 << 18];
  return memory;
}

struct Barrier {
  int count, arrived, phase, bytes;

  void init(int arrivals) { count = arrivals, arrived = phase = bytes = 0; }
  void arrive() {
    if (++arrived == count) arrived = 0, phase ^= 1;
  }
  void arrive_expecting(int announced) { bytes = announced; }
  void wait(int ended) {
    while (phase == ended) __syncthreads();
  }
};

static void barriers_are_made() {}
static void bulk_copy(void* to, const void* from, int bytes, Barrier& at) {
  memcpy(to, from, bytes);
  if ((at.bytes -= bytes) == 0) at.arrive();
}
template <int BYTES> static void start_copy(void* to, const void* from, bool there) {
  there ? memcpy(to, from, BYTES) : memset(to, 0, BYTES);
}
static void wait_for_copies() {}
template <int N> static void give_registers_back() {}
template <int N> static void take_registers() {}

struct OperandRows {
  const unsigned char* begin;
  int across;
  unsigned at(int row, int column) const {
    return begin[row / 8 * across + column / 16 * 128 + row % 8 * 16 + column % 16];
  }
};
struct Operand {
  const unsigned char* begin;
  int across;
  Operand(const void* p, int bytes) : begin((const unsigned char*)p), across(bytes) {}
  OperandRows step(int k) const { return {begin + k * 256, across}; }
};

static void wait_for_turn(int) {}
static void give_turn_to(int) {}
static void before_products() {}
static void end_group() {}
template <class T> static void results_are_there(T&) {}
template <int N> static void wait_for_products() {}

static float of_e4m3(unsigned v) {
  const int exponent = v >> 3 & 15;
  const float size = exponent ? ldexpf(8 + (v & 7), exponent - 10) : ldexpf(v & 7, -9);
  return v & 128 ? -size : size;
}
static void add_product(int& sum, unsigned a, unsigned b) { sum += (signed char)a * (signed char)b; }
static void add_product(float& sum, unsigned a, unsigned b) { sum += of_e4m3(a) * of_e4m3(b); }

// The four threads that share two rows of `a` exchange their parts of it.
template <class T, int N> static void start_product(T (&c)[N], const unsigned (&a)[4], OperandRows b) {
  unsigned rows[2][8];
  for (int from = 0; from < 4; from++)
    for (int i = 0; i < 4; i++)
      rows[i % 2][i / 2 * 4 + from] = __shfl_sync(~0u, a[i], threadIdx.x % 32 / 4 * 4 + from);
  for (int i = 0; i < N; i++)
    for (int k = 0; k < 32; k++)
      add_product(c[i], rows[i / 2 % 2][k / 4] >> 8 * (k % 4) & 255, b.at(i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, k));
}
template <class T, int N> static void start_new_product(T (&c)[N], const unsigned (&a)[4], OperandRows b) {
  for (int i = 0; i < N; i++) c[i] = 0;
  start_product(c, a, b);
}

static unsigned four_e4m3(float a, float b, float c, float d) {
  return (unsigned)e4m3_pair(c, d) << 16 | e4m3_pair(a, b);
}
static int max_of_three(int a, int b, int c) { return max(max(a, b), c); }
static float exp2_near(float x) { return exp2f(x); }
